"""Runs causal language models of transformers with paged attention. Imported only when a model needs it."""
