"""Blocks of the KV cache: free, shared, cached, on the host. Knows no policy and no gRPC."""
