"""One step of a batch, from what is scheduled to tokens, in order. No gRPC, no messages."""
