"""What the commands under ``pagoda bench`` share: prompts, load, figures."""
