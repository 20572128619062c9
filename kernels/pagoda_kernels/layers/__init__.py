"""Norms and gates of a layer. Tensors only."""
