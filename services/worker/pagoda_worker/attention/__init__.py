"""Chooses the package that computes a step's attention, by measurement. No gRPC, no requests."""
