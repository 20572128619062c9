"""LoRA adapters in the scheduler: which there are, and which of them a group's workers have. Knows no messages."""
