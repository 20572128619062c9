"""Mistral's own form of checkpoints: params.json and tekken.json. Knows no weights and no tensors."""
