"""The public gRPC service over the same requests and conversations. Knows no HTTP."""
