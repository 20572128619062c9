"""Reads the tensors of GGUF files as a model's matrices, with transformers' names and row order. Knows no models."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf.config import ROPE_FACTORS, checkpoint_names, family_of
from pagoda_common.gguf.file import GgufFile, GgufTensor
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader.formats.ggml_blocks import read_blocks
from pagoda_worker.loader.tensor_file import read_bytes


class GgufWeights:
    """One open file, for any thread."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ModelLoadError: the file is damaged.
            OSError: the file cannot be read.
        """
        self.file = GgufFile.read(path)
        self.descriptor = os.open(path, os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufMatrix:
    """A tensor of an open file, or one of the tensors stacked in it."""

    weights: GgufWeights
    tensor: GgufTensor
    index: int | None = None
    """Index of the expert in the first dimension."""
    num_heads: int = 0
    """Number of heads whose rows are stored as adjacent pairs and needed as halves; 0: rows are in order."""
    offset: float = 0.0
    """Number that the file has added to every value."""

    @property
    def stored_name(self) -> str:
        """In the file."""
        return self.tensor.name

    @property
    def shape(self) -> list[int]:
        """Shape in torch's order."""
        return list(self.tensor.shape if self.index is None else self.tensor.shape[1:])

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return self.tensor.num_bytes // (1 if self.index is None else self.tensor.shape[0])

    def read(self) -> Tensor | QuantizedMatrix:
        """Floats, or integers if these are exact.

        Raises:
            OSError: the file ends too early.
            ModelLoadError: a scale is not a number.
        """
        path, shape = self.weights.file.path, self.shape
        offset = self.tensor.offset + (self.index or 0) * self.num_bytes
        data = read_bytes(self.weights.descriptor, offset, self.num_bytes, f"{path} ends within {self.stored_name}")
        matrix = read_blocks(self.tensor.type.name, data.view(math.prod(shape[:-1]), -1), shape[-1])
        numbers = matrix.scales if isinstance(matrix, QuantizedMatrix) else matrix
        if not bool(numbers.isfinite().all()):
            raise ModelLoadError(f"{path}: {self.stored_name} has numbers that are not finite")
        if isinstance(matrix, QuantizedMatrix):
            return _of_rows(matrix, self._order()) if len(shape) == 2 else matrix.dequantize().view(shape)
        matrix = matrix.view(shape)
        if self.offset:
            matrix = matrix.float() - self.offset
        order = self._order()
        return matrix if order is None else matrix[order]

    def _order(self) -> Tensor | None:
        """Index of the stored row for each row, [rows]; None: unchanged."""
        if not self.num_heads:
            return None
        rows = torch.arange(self.shape[0])
        return rows.view(self.num_heads, -1, 2).transpose(1, 2).reshape(-1)


def _of_rows(matrix: QuantizedMatrix, order: Tensor | None) -> QuantizedMatrix:
    if order is None:
        return matrix
    zeros = None if matrix.zeros is None else matrix.zeros[order]
    return replace(matrix, numbers=matrix.numbers[order], scales=matrix.scales[order], zeros=zeros)


def gguf_matrices(weights: Sequence[GgufWeights]) -> dict[str, GgufMatrix]:
    """All tensors of a model's files, by transformers' names; tensors without such a name keep theirs.

    Raises:
        ModelLoadError: a tensor is in several files, or rows cannot be reordered.
    """
    first = weights[0].file
    family, found = family_of(first), dict[str, GgufMatrix]()
    prefix = str(first.metadata["general.architecture"])
    num_heads = first.metadata.get(f"{prefix}.attention.head_count")
    num_kv_heads = first.metadata.get(f"{prefix}.attention.head_count_kv", num_heads)
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if family.has_rope_order else {}
    for opened in weights:
        for tensor in opened.file.tensors.values():
            if tensor.name == ROPE_FACTORS:  # a part of the config
                continue
            part = tensor.name.split(".")[-2] if tensor.name.count(".") > 1 else ""
            rows_of = heads.get(part, 0)
            if rows_of and (not isinstance(rows_of, int) or tensor.shape[0] % (2 * rows_of)):
                raise ModelLoadError(
                    f"{opened.file.path}: {tensor.name} has {tensor.shape[0]} rows, must be a multiple of twice its "
                    f"{rows_of} heads"
                )
            names = checkpoint_names(family, tensor) or [tensor.name]
            for index, name in enumerate(names):
                if name in found:
                    raise ModelLoadError(f"{opened.file.path}: {tensor.name} is there twice")
                found[name] = GgufMatrix(
                    weights=opened,
                    tensor=tensor,
                    index=index if len(tensor.shape) > 2 else None,
                    num_heads=int(rows_of or 0),
                    offset=family.norm_offset if tensor.name.endswith("norm.weight") else 0.0,
                )
    return found
