"""GGUF files: what stands in them, as the config and the tokenizer of a checkpoint. Knows no weights and no tensors."""
