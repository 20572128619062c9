"""Linear layers: packed, compressed and quantized weights. Tensors only."""
