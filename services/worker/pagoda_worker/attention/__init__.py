"""Which package computes a step's attention, by measurement. No gRPC, no requests."""
