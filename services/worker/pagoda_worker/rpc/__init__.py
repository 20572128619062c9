"""The worker's gRPC service and registration: convert messages to domain types and back. Knows no tensors."""
