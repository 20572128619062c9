"""Parameters and results of requests: plain data. Knows no gRPC."""
