"""Operations on tensors, one a file: a wrapper that checks, and the plain PyTorch reference it is measured against."""
