"""How checkpoints store quantized matrices, a format a module. Knows tensors and quantization_config; no files."""
