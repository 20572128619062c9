"""Mixtures of experts: which experts a token goes to, and what they compute of it. Knows tensors; no models."""
