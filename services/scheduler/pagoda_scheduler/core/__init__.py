"""The scheduling policy: decides which tokens run in the next step, and applies results to sequences. No gRPC, no
clock, no tensors."""
