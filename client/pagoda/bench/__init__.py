"""Shared parts of the commands under ``pagoda bench``: prompts, load, figures."""
