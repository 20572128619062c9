"""The models that a frontend serves, each with its engine, tokenizer and limits. Knows no shape of an API."""
