"""Management of KV-cache blocks: free, shared, cached, on the host. Knows no policy and no gRPC."""
