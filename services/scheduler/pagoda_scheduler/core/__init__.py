"""The policy: which tokens run in the next step, and what results do to sequences. No gRPC, no clock, no tensors."""
