"""gRPC plumbing: servers, channels, credentials, keys. Knows no service of ours."""
