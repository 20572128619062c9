"""Logits to tokens: rules, constraints, log probabilities, drafts. No gRPC, no model."""
