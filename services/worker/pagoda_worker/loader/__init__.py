"""Reads Hugging Face checkpoints."""
