"""Attention over the paged KV cache, and what writes that cache. Tensors only."""
