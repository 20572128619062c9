"""Text and tokens: tokenizer, chat template, incremental detokenizer, stop strings. No gRPC, no torch."""
