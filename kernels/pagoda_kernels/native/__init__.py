"""Kernels in C++ for the CPU: sources in csrc/, compiled on the machine that runs them."""
