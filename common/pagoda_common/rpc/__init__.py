"""gRPC infrastructure: servers, channels, credentials, keys. Knows no specific service."""
