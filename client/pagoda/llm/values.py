"""Arrays of pooling that programs written for torch take as tensors. Needs no torch before one of them does."""

from importlib import import_module
from typing import Any

import numpy as np

TENSOR_METHODS = frozenset(
    (
        "bfloat16",
        "clone",
        "cpu",
        "cuda",
        "detach",
        "device",
        "dim",
        "double",
        "float",
        "half",
        "is_contiguous",
        "numpy",
        "to",
        "unsqueeze",
    )
)
"""What programs call on vLLM's results, and arrays do not have; the result is torch's."""


class Values(np.ndarray[Any, Any]):
    """A NumPy array. Functions of torch take it as a tensor: `torch.stack([one.outputs.data for one in outputs])`."""

    def tensor(self) -> Any:
        """The same values as a tensor of torch, in the same memory."""
        torch = import_module("torch")  # by name: this process does without torch until a program asks for it
        return torch.from_numpy(np.require(self, requirements="W").view(np.ndarray))

    def __getattr__(self, name: str) -> Any:
        if name not in TENSOR_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch's protocol for objects that are no tensors of its own."""
        return function(*_as_tensors(args), **_as_tensors(kwargs or {}))


def _as_tensors(given: Any) -> Any:
    if isinstance(given, Values):
        return given.tensor()
    if isinstance(given, list | tuple):
        return type(given)(_as_tensors(one) for one in given)
    if isinstance(given, dict):
        return {name: _as_tensors(one) for name, one in given.items()}
    return given
