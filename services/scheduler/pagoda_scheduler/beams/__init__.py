"""Beam search: the algorithm, and beams as sequences. Knows no blocks and no gRPC."""
