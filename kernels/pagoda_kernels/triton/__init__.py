"""Triton kernels, one operation a file; the operation's own module says what it computes and holds the reference.

Written for Triton 3.6 and newer. They are checked in Triton's interpreter, and on an H200 (docs/gpu.md).
"""
