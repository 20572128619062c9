"""Model: the worker's interface of a model. Knows tensors and names; no decoder, no checkpoint files."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.config.pooler_config import PoolingType
from pagoda_kernels.decoder.composed_layers import ComposedLayers
from pagoda_kernels.decoder.decoder_layers import DecoderLayers
from pagoda_worker.models.cache_groups import CacheGroup, groups_by_window
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.models.weights import WeightNames
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel
from pagoda_worker.pooling.pooling_files import NO_FILES, PoolingFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    """The configuration of a model: one object for every architecture."""

    checkpoint: HfConfig = field(default_factory=dict)
    """config.json, as it was read."""
    engine: ModelConfig = field(default_factory=ModelConfig)
    """The engine's options."""
    pooling: PoolingFiles = NO_FILES
    """Pooling options from other files of the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayer:
    """Attention options of one layer of a rank's part, and the shape of its cache entries: keys and values of a token,
    or a latent for both."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scale of scores, before the softmax."""
    window: int | None = None
    """Number of keys that a query sees, its own included; None: all."""
    chunk: int | None = None
    """Query i sees the keys from i // chunk * chunk to its own; None: `window` applies."""
    softcap: float | None = None
    """Scores are bounded by softcap * tanh(score / softcap)."""
    has_biases: bool = False
    """Scores have linear biases (ALiBi)."""
    has_sinks: bool = False
    """Each head has one more score in the softmax, without a value."""
    latent_rank: int = 0
    """If not 0, the only KV head's keys are latents: values are computed from the first `latent_rank` numbers, and
    there is no cache of values."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A part of a recurrent layer's state of a sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: the model's data type."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per sequence. `dtype`: the model's."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """The state that one recurrent layer of a rank keeps of a sequence: of fixed size, zeros at first."""

    tensors: tuple[StateTensor, ...]


class WeightSharding(Protocol):
    """The part of each whole parameter that one rank holds."""

    def rows(self, parameter: str, num_rows: int) -> tuple[range, ...]:
        """Rows of a whole parameter of `num_rows`, in order; no rows: the rank holds zeros instead."""

    def columns(self, parameter: str, num_columns: int) -> range:
        """Columns of a whole matrix of `num_columns`."""


class Unsharded:
    """Sharding for a single rank."""

    def rows(self, parameter: str, num_rows: int) -> tuple[range, ...]:
        """See WeightSharding."""
        return (range(num_rows),)

    def columns(self, parameter: str, num_columns: int) -> range:
        """See WeightSharding."""
        return range(num_columns)


class Model(nn.Module, ABC):
    """A causal language model, or one rank's part of it.

    It is built on the meta device; the loader fills its parameters, then `prepare` makes tables that are not weights.
    Every architecture has the same constructor (`ModelFactory`).
    """

    architecture: str
    """Name as in config.json."""
    vocab_size: int
    """Columns of the logits."""
    embedding_size: int
    """Length of the final hidden state that logits are computed from."""
    max_position_embeddings: int
    """Maximum sequence length of the checkpoint, in tokens."""
    num_layers: int
    attention_layers: tuple[AttentionLayer, ...]
    """Attention layers of this rank's part, in order: layer i has cache i."""
    only_pools: bool = False
    """Whether the model generates nothing, and sees each sequence whole."""
    recurrent_layers: tuple[RecurrentLayer, ...] = ()
    """Recurrent layers of this rank's part, in order: layer i has state i."""
    sharding: WeightSharding = Unsharded()

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, object]:
        """Options, by name, that another checkpoint must share to replace this one."""

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Whole default tensors, by name, of parameters that a checkpoint may omit; none by default."""
        return {}

    @abstractmethod
    def weights(self, stored: Collection[str]) -> WeightNames:
        """The sources of all parameters.

        Args:
            stored: the names of all tensors of the checkpoint.
        """

    @abstractmethod
    def dummy_value(self, parameter: str) -> float | None:
        """The value of a parameter with random weights: a number; None: small random values."""

    @abstractmethod
    def prepare(self, *, max_model_len: int, device: torch.device) -> None:
        """Build tables that are not weights, for positions below `max_model_len`."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """The last hidden state of a packed batch, ready for `compute_logits`: [num_tokens, embedding_size].

        Args:
            input_ids, positions: [num_tokens] int64, the sequences of the context's plan one after the other.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, embedding_size] rows of `forward` to [n, vocab_size] float32 on rank 0; other ranks' results are
        meaningless."""

    def cast(self, dtype: torch.dtype) -> None:
        """Set the data type of floats, all on the meta device; a module's `float32_parameters` keep theirs."""
        self.to(dtype)
        for module in self.modules():
            for name in getattr(module, "float32_parameters", ()):
                if getattr(module, name) is not None:
                    empty = torch.empty_like(module.get_parameter(name), dtype=torch.float32)
                    setattr(module, name, nn.Parameter(empty, requires_grad=False))

    def rotary(self, positions: Tensor) -> Mapping[Any, tuple[Tensor, Tensor]]:
        """Cosines and sines of a step's positions, for the context; none by default."""
        return {}

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Groups of layers by the data that they keep of a sequence. Layers with keys of different shapes cannot share
        blocks, so all of them keep every token."""
        shapes = {(layer.num_kv_heads, layer.head_dim) for layer in self.attention_layers}
        spans = [layer.chunk or layer.window for layer in self.attention_layers]  # what is in a chunk is in a window
        paged = groups_by_window(spans if len(shapes) == 1 else [None] * len(spans))
        if any(layer.latent_rank for layer in self.attention_layers):
            assert all(layer.latent_rank for layer in self.attention_layers), "latents are kept by all layers or none"
            paged = tuple(replace(group, kind="latent") for group in paged)
        if not self.recurrent_layers:
            return paged
        return (*paged, CacheGroup("recurrent", tuple(range(len(self.recurrent_layers)))))

    def fuse_layers(
        self, *, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], places: Mapping[int, tuple[int, int]]
    ) -> DecoderLayers | ComposedLayers | None:
        """A call that runs all layers over these caches; None if there is none.

        Args:
            k_caches, v_caches, places: as in ForwardContext.
        """
        return None

    def release_kernels(self) -> None:
        """Release weights that kernels hold, before they leave the device or are replaced."""
        for module in self.modules():
            if module is not self and callable(release := getattr(module, "release_kernels", None)):
                release()

    @property
    def what_waits(self) -> str | None:
        """The part of a decode step on an accelerator that waits for the host, which prevents CUDA graphs; None if
        nothing does."""
        return None


Head: TypeAlias = Literal["none", "sequence", "token", "vocabulary"]
"""Head on the hidden states: none, labels of a text, labels of a token, or logits of the vocabulary."""


class PoolingHeads(ABC):
    """Heads of a model that sees whole sequences, for labels and scores."""

    head: Head
    num_labels: int
    """Number of labels; 0: none."""
    label_pooling: PoolingType
    """Default pooling of a text, and the input of its head."""

    @abstractmethod
    def classify(self, pooled: Tensor) -> Tensor:
        """[n, embedding_size], one vector per text, to [n, num_labels] float32 logits."""

    @abstractmethod
    def classify_tokens(self, hidden: Tensor) -> Tensor:
        """[n, embedding_size], one vector per token, to [n, num_labels or vocab_size] float32 logits."""


class ModelFactory(Protocol):
    """Builds models of an architecture: a class, or a function."""

    def __call__(self, *, config: BuildConfig, prefix: str = "", parallel: TensorParallel = ALONE) -> Model:
        """
        Args:
            prefix: of the names of its parameters.
            parallel: the ranks that share the model.

        Raises:
            ModelLoadError: config.json lacks a value, or has one that is not supported.
            ConfigError: the ranks cannot share the model.
        """
