"""Open requests over worker groups, and the step loop of a group. No gRPC, no messages."""
