"""The interface to attention kernels of another package: whether they exist, what they support, and one call."""

import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pagoda_kernels.attention.plan import AttentionPlan


class Scoring(NamedTuple):
    """How a layer makes scores of queries and keys; see `paged_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """Requirements of a model's layers on attention, on one device."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Data type of the queries."""
    cache_dtype: torch.dtype
    layers: tuple[Scoring, ...]
    """One a layer."""
    has_biases: bool = False
    """Scores get linear biases."""
    capability: tuple[int, int] = (0, 0)
    """The device's compute capability."""


class Adapter(ABC):
    """Attention of another package over our paged cache as it lies there. One caller at a time."""

    name: ClassVar[str]
    """As --attention-backend has it."""
    module: ClassVar[str]
    """Name of the imported module."""
    distribution: ClassVar[str]
    """Name of the installed package."""

    @classmethod
    def is_installed(cls) -> bool:
        """Whether the package is there. It is not imported for that."""
        return importlib.util.find_spec(cls.module) is not None

    @classmethod
    def version(cls) -> str:
        """Version of the installed package, or "unknown"."""
        try:
            return importlib.metadata.version(cls.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    @classmethod
    @abstractmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        """Why these layers cannot be served; None: they can, as far as the package's documentation says."""

    @abstractmethod
    def __init__(self, *, needs: AttentionNeeds, device: torch.device) -> None:
        """Import the package and take the memory that it works in. Raises whatever that raises."""

    @abstractmethod
    def __call__(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """`pagoda_kernels.attention.paged_attention.paged_attention` without linear biases, whose arguments these are.

        The plan's columns on the host have to be those of the step: it is no plan of a recorded one.
        """


def plain_refusal(needs: AttentionNeeds) -> str | None:
    """The reason why no package can be used here."""
    if needs.has_biases:
        return "scores have linear biases"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"the data type is {_name(needs.dtype)}, must be bfloat16 or float16"
    if needs.cache_dtype != needs.dtype:
        return f"the KV cache is of {_name(needs.cache_dtype)}, must be of {_name(needs.dtype)} like the queries"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
