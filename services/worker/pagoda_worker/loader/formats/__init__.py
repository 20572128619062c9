"""Formats of quantized matrices in checkpoints, one per module. Knows tensors and quantization_config; no files."""
