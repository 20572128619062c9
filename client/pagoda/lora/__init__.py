"""Names of LoRA adapters where vLLM has them; adapters themselves are not supported."""
