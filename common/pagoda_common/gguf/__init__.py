"""GGUF files: reads their content as a checkpoint's config and tokenizer. Knows no weights and no tensors."""
