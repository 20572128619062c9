"""LoRA adapters in the scheduler: the list of adapters, and those in a group's workers. Knows no messages."""
