"""The engine: open requests over worker groups, and each group's step loop. No gRPC, no messages."""
