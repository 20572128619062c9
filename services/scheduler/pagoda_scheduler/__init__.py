"""The scheduler service: the engine. Owns each request's token log and the schedule; no tensors, no text."""
