"""The scheduler's gRPC services and clients: convert messages to domain types and back. Decides nothing."""
