"""What a request asks for and what it gives back: plain data. Knows no gRPC."""
