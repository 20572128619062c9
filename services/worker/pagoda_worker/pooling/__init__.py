"""Pooling of hidden states: vectors, labels, scores."""
