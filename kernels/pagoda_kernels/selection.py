"""Which implementation of an operation runs: a Triton kernel, a C++ kernel, or PyTorch. Knows names; no kernels."""

import importlib
import importlib.util
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""CUDA compute capability from which the Triton kernels run: older devices have no bfloat16."""
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Data types of the Triton kernels, unless one names others."""

_references: frozenset[str] = frozenset()
_takes_cpu_tensors = False


def use_references(operations: Iterable[str]) -> None:
    """Compute these operations with torch, whatever else is there; "all" is every one, none takes all back."""
    global _references
    _references = frozenset(operations)


def is_set_aside(operation: str) -> bool:
    """Whether `use_references` named this operation, or all."""
    return operation in _references or "all" in _references


def triton_kernel(operation: str, tensor: Tensor) -> Any:
    """The Triton implementation of an operation for tensors like this one, or None.

    None: the tensor is on no CUDA device, there is no Triton, or the operation was set aside. What dtypes and layouts
    fit, the operation's wrapper decides.
    """
    if not tensor.is_cuda:
        if not (_takes_cpu_tensors and tensor.is_cpu):
            return None
    elif not _can_run(tensor.device):
        return None
    return None if is_set_aside(operation) else _load(operation)


@contextmanager
def triton_on_cpu() -> Iterator[None]:
    """Within: CPU tensors go to Triton kernels too. Only for Triton's interpreter (TRITON_INTERPRET=1)."""
    global _takes_cpu_tensors
    before, _takes_cpu_tensors = _takes_cpu_tensors, True
    try:
        yield
    finally:
        _takes_cpu_tensors = before


@cache
def _load(operation: str) -> Any:
    """Triton is imported with the first kernel that is used: a worker on a CPU never pays for it."""
    return getattr(importlib.import_module(f"pagoda_kernels.triton.{operation}"), operation)


@cache
def _can_run(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        logger.warning("triton is not installed: operations on %s run as plain PyTorch", device)
        return False
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        logger.warning("%s has compute capability %d.%d: operations run as plain PyTorch", device, *capability)
        return False
    return True
