"""The device, its memory, the KV cache and copies. Knows no requests and no gRPC."""
