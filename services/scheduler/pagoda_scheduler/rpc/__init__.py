"""The scheduler's services and clients: messages to domain types and back. Decides nothing."""
