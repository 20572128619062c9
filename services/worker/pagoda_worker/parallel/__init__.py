"""Tensor parallelism: ranks that hold one model together, and their connections. No gRPC."""
