"""All layers of a decoder in one call, on a CPU. Tensors only."""
