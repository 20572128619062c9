"""Dense layers of sentence-transformers after pooling, and the heads of bge-m3. Knows tensors and files."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_worker.pooling.pooling_files import DenseFile


class Dense:
    """One layer, in float32."""

    def __init__(self, *, weight: Tensor, bias: Tensor | None, activation: str = "", is_norm: bool = False) -> None:
        """`weight`: [out, in], or [size] of a layer norm."""
        self.weight, self.bias = weight.float(), None if bias is None else bias.float()
        self._activation = activation
        self._is_norm = is_norm

    @property
    def out_features(self) -> int:
        """Output size."""
        return int(self.weight.shape[0])

    @property
    def in_features(self) -> int:
        """Input size."""
        return int(self.weight.shape[-1])

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in_features] float32 to [n, out_features]."""
        if self._is_norm:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias)
        y = F.linear(x, self.weight, self.bias)
        functions = {"tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu}
        return functions[self._activation](y) if self._activation else y

    def to(self, device: torch.device) -> "Dense":
        """A copy on a device."""
        self.weight = self.weight.to(device)
        self.bias = None if self.bias is None else self.bias.to(device)
        return self


def load_dense(file: DenseFile) -> Dense:
    """
    Raises:
        ModelLoadError: its weights are missing, unreadable or have the wrong names.
    """
    tensors = read_tensors(file.directory / "model.safetensors", file.directory / "pytorch_model.bin")
    prefix = "norm." if file.is_norm else "linear."
    weight, bias = tensors.get(f"{prefix}weight"), tensors.get(f"{prefix}bias")
    if weight is None:
        raise ModelLoadError(f"{file.directory} has no {prefix}weight")
    return Dense(weight=weight, bias=bias, activation=file.activation, is_norm=file.is_norm)


def read_tensors(path: Path, pickled: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a file pickled by torch, from which only tensors are read.

    Raises:
        ModelLoadError: both are missing, or the file cannot be read.
    """
    try:
        if path.is_file():
            return load_file(path)
        if pickled.is_file():
            return dict(torch.load(pickled, map_location="cpu", weights_only=True))
    except Exception as error:  # whatever readers raise
        raise ModelLoadError(f"cannot read {path.parent}: {type(error).__name__}: {str(error)[:100]}") from error
    raise ModelLoadError(f"{path.parent} has no {path.name}")
