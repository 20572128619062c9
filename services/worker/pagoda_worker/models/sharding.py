"""Sharding: the part of a model that one rank holds. Knows names and shapes; no connections.

Queries, keys and values go by heads (a KV head is on several ranks where there are fewer of them), the feed-forward and
every expert by intermediate columns, the head of the model by rows of the vocabulary. The output projections o_proj and
down_proj take the matching input columns, so their results are summed over ranks; their bias is added by rank 0.
Embeddings, norms and routers are on every rank. Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

import itertools
import re
from dataclasses import dataclass, replace

from pagoda_common.errors import ConfigError
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import TensorParallel

_ROW_SUMMED = re.compile(r"\.(o_proj|down_proj)\.")
_RECURRENT = re.compile(r"layers\.(\d+)\.attention\.(?:recurrent\.)?(\w+)")
"""A parameter of a mixer: its layer, and what it is called there."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """One rank's part of a model."""

    spec: DecoderSpec
    """Of the whole model."""
    parallel: TensorParallel

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: the model cannot be divided among so many ranks.
        """
        size = self.parallel.world_size
        if size == 1:
            return
        spec, moe = self.spec, self.spec.moe
        if spec.qk_norm == "width":
            raise ConfigError(
                f"world_size is {size}, must be 1 for {spec.architecture}: its norms of queries and keys are over all "
                "heads together",
                field="world_size",
            )
        layers = [layer for layer in range(spec.num_layers) if spec.has_feed_forward(layer)]
        is_dense = any(spec.layer_moe(layer) is None for layer in layers)
        for name, value, is_used in (
            ("num_heads", spec.num_heads, True),
            ("intermediate_size", spec.intermediate_size, is_dense),
            ("moe intermediate_size", moe.intermediate_size if moe else 0, moe is not None),
            ("shared intermediate_size", moe.shared_intermediate_size if moe else 0, moe is not None),
        ):
            if is_used and value % size:
                raise ConfigError(f"world_size is {size}, must divide {name}, {value}", field="world_size")
        if spec.recurrence is not None:
            spec.recurrence.of_rank(size)
        if spec.num_kv_heads % size and size % spec.num_kv_heads:
            raise ConfigError(
                f"world_size is {size}, must divide num_kv_heads, {spec.num_kv_heads}, or be a multiple of it",
                field="world_size",
            )

    @property
    def local_spec(self) -> DecoderSpec:
        """The spec to build this rank's decoder from."""
        size, spec = self.parallel.world_size, self.spec
        if size == 1:
            return spec
        heads, moe, recurrence = self._heads, spec.moe, spec.recurrence
        if moe is not None:
            moe = replace(
                moe,
                intermediate_size=moe.intermediate_size // size,
                shared_intermediate_size=moe.shared_intermediate_size // size,
            )
        return replace(
            spec,
            num_heads=len(heads),
            num_kv_heads=len(self._kv_heads),
            # Without a dense layer it is not used, and need not be divisible.
            intermediate_size=max(1, spec.intermediate_size // size),
            alibi_slopes=spec.alibi_slopes[heads.start : heads.stop],
            moe=moe,
            recurrence=None if recurrence is None else recurrence.of_rank(size),
        )

    @property
    def _heads(self) -> range:
        return self.parallel.part(self.spec.num_heads)

    @property
    def _kv_heads(self) -> range:
        size, count = self.parallel.world_size, self.spec.num_kv_heads
        first = self.parallel.rank * count // size
        return range(first, first + max(1, count // size))

    def rows(self, parameter: str, num_rows: int) -> tuple[range, ...]:
        """Rows of a whole parameter of `num_rows` that this rank holds, in order; none: it holds zeros in their place.

        Args:
            parameter: dotted name in the Decoder.
        """
        parallel, spec = self.parallel, self.spec
        everything = (range(num_rows),)
        if parallel.world_size == 1:
            return everything
        if ".qkv_proj." in parameter:
            value = spec.num_qkv_heads - spec.num_kv_heads
            key = value - spec.num_kv_heads
            groups = [(0, self._heads), (key, self._kv_heads), (value, self._kv_heads)]
            if spec.has_attention_gate:
                groups.insert(1, (spec.num_heads, self._heads))
            dim = spec.head_dim
            return tuple(range((at + heads.start) * dim, (at + heads.stop) * dim) for at, heads in groups)
        if (rows := self._recurrent_rows(parameter)) is not None:
            return rows
        if parameter.endswith(".sinks"):
            return (self._heads,)
        if ".up_proj." in parameter and spec.is_gated:
            half = num_rows // 2
            part = parallel.part(half)
            return part, range(half + part.start, half + part.stop)
        if ".up_proj." in parameter or parameter.startswith("lm_head"):
            return (parallel.part(num_rows),)
        if spec.qk_norm == "each_head" and ".q_norm." in parameter:
            return (self._heads,)
        if spec.qk_norm == "each_head" and ".k_norm." in parameter:
            return (self._kv_heads,)
        if parameter.endswith(".bias") and _ROW_SUMMED.search(parameter) and not parallel.is_leader:
            return ()
        return everything

    def _recurrent_rows(self, parameter: str) -> tuple[range, ...] | None:
        """`rows` of a recurrent layer's parameter that ranks share; None: it is none."""
        match = _RECURRENT.match(parameter)
        if self.spec.recurrence is None or match is None or not self.spec.is_recurrent(int(match[1])):
            return None
        parts = self.spec.recurrence.parts(match[2], self.parallel.world_size)
        begins = itertools.accumulate((size for size, _ in parts), initial=0)
        mine = [self.parallel.part(size) if is_shared else range(size) for size, is_shared in parts]
        rows = [range(at + part.start, at + part.stop) for at, part in zip(begins, mine, strict=False)]
        return tuple(rows) or None

    def columns(self, parameter: str, num_columns: int) -> range:
        """Columns of a whole matrix of `num_columns` that this rank holds."""
        is_split = self.parallel.world_size > 1 and _ROW_SUMMED.search(parameter)
        return self.parallel.part(num_columns) if is_split else range(num_columns)
