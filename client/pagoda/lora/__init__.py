"""Names of LoRA adapters under vLLM's module names."""
