"""The worker's service and registration: messages to domain types and back. Knows no tensors."""
