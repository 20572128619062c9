"""The worker service: holds the weights and the KV cache, and runs the model for the scheduler."""
