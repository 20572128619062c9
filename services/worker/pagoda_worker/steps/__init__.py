"""Runs the steps of a batch in order, from scheduled input to sampled tokens. No gRPC, no messages."""
