"""Sampling: from logits to tokens, with rules, constraints, log probabilities and drafts. No gRPC, no model."""
