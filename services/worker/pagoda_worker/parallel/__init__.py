"""Ranks that hold one model together, and what goes between them. No gRPC."""
