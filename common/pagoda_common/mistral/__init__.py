"""Mistral's checkpoint format: params.json and tekken.json. Knows no weights and no tensors."""
