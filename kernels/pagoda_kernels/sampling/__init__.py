"""Logits to tokens and log probabilities. Tensors only."""
