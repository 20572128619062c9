"""Decoder-only language models, all from one core with options."""
