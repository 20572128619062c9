"""What the three services and the client share: configuration, errors, RPC plumbing, text, metrics."""
