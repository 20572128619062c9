"""Messages and tools in, an assistant's message out. Knows no HTTP, no gRPC, no messages of pagoda.v1."""
