"""Low-rank matrices that are added to a layer's product, row by row of a batch. Knows tensors; no adapters."""
