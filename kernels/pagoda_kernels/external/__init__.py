"""Kernels of other packages, each behind an adapter. No package is needed, and none is imported before it is used."""
