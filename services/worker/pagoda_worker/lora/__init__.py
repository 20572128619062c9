"""LoRA adapters: read from PEFT checkpoints, kept in memory, added to the products of a model's layers. Knows tensors
and layers; no requests, no messages."""
