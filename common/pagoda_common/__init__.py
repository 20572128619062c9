"""Shared by the three services and the client: configuration, errors, RPC plumbing, text, metrics."""
