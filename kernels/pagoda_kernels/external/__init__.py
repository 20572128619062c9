"""Kernels of other packages, each with an adapter. No package is needed, and none is imported before it is used."""
