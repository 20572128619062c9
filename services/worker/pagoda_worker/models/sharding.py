"""Sharding: the part of a model that one rank holds. Knows names and shapes; no connections.

Queries, keys and values are divided by heads (a KV head is on several ranks if there are fewer than ranks), the
feed-forward and every expert by intermediate columns, the model's head by rows of the vocabulary. The output
projections o_proj and down_proj, and Mamba's x_proj, take the matching input columns, so their results are summed over
ranks; their bias is added by rank 0. Norms of queries and keys over all heads are divided by heads as well, and their
mean squares are summed over ranks. Embeddings, other norms, routers and projections to latents are on every rank.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

import itertools
import re
from dataclasses import dataclass, replace

from pagoda_common.errors import ConfigError
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import TensorParallel

_ROW_SUMMED = re.compile(r"\.(o_proj|down_proj|x_proj)\.")
_RECURRENT = re.compile(r"layers\.(\d+)\.attention\.(?:recurrent\.)?(\w+)")
"""A parameter of a mixer: its layer, and its name there."""
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Sharding:
    """One rank's part of a model."""

    spec: DecoderSpec
    """Specification of the whole model."""
    parallel: TensorParallel

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: the model cannot be divided among this number of ranks.
        """
        size = self.parallel.world_size
        if size == 1:
            return
        spec, moe = self.spec, self.spec.moe
        if spec.qk_norm == "width" and not (spec.norm == "rms_norm" and spec.norm_has_weights):
            raise ConfigError(
                f"world_size is {size}, must be 1 for {spec.architecture}: its norms of queries and keys over "
                "all heads are no root-mean-square norms with weights",
                field="world_size",
            )
        if spec.shared_blocks is not None:
            raise ConfigError(
                f"world_size is {size}, must be 1 for {spec.architecture}: its layers share attention",
                field="world_size",
            )
        layers = [layer for layer in range(spec.num_layers) if spec.has_feed_forward(layer)]
        is_dense = any(spec.layer_moe(layer) is None for layer in layers) or (moe is not None and moe.is_beside)
        attends = any(map(spec.attends, range(spec.num_layers)))
        for name, value, is_used in (
            ("num_heads", spec.num_heads, attends),
            ("moe intermediate_size", moe.intermediate_size if moe else 0, moe is not None),
            ("shared intermediate_size", moe.shared_intermediate_size if moe else 0, moe is not None),
        ):
            if is_used and value % size:
                raise ConfigError(f"world_size is {size}, must divide {name}, {value}", field="world_size")
        if spec.recurrence is not None:
            spec.recurrence.of_rank(size)
        for sizes in spec.layer_sizes or (spec,):
            self._check_sizes(sizes.intermediate_size if is_dense else size, sizes.num_kv_heads if attends else size)

    def _check_sizes(self, intermediate_size: int, num_kv_heads: int) -> None:
        """Check the sizes of the model or of one layer.

        Raises:
            ConfigError: the ranks cannot share it.
        """
        size = self.parallel.world_size
        if intermediate_size % size:
            raise ConfigError(
                f"world_size is {size}, must divide intermediate_size, {intermediate_size}", field="world_size"
            )
        if num_kv_heads % size and size % num_kv_heads:
            raise ConfigError(
                f"world_size is {size}, must divide num_kv_heads, {num_kv_heads}, or be a multiple of it",
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
            num_heads=max(1, len(heads)),  # without attention it is not used, and need not be divisible either
            num_kv_heads=len(self._kv_heads(spec.num_kv_heads)),
            # Without a dense layer it is not used, and need not be divisible.
            intermediate_size=max(1, spec.intermediate_size // size),
            layer_sizes=tuple(
                replace(
                    sizes,
                    num_kv_heads=len(self._kv_heads(sizes.num_kv_heads)),
                    intermediate_size=max(1, sizes.intermediate_size // size),
                )
                for sizes in spec.layer_sizes
            ),
            alibi_slopes=spec.alibi_slopes[heads.start : heads.stop],
            moe=moe,
            recurrence=None if recurrence is None else recurrence.of_rank(size),
        )

    @property
    def _heads(self) -> range:
        return self.parallel.part(self.spec.num_heads)

    def _rows_of_heads(self, size: int) -> range:
        """Rows of this rank's heads, each with `size` rows."""
        return range(self._heads.start * size, self._heads.stop * size)

    def _kv_heads(self, count: int) -> range:
        """This rank's part of `count` KV heads."""
        size = self.parallel.world_size
        first = self.parallel.rank * count // size
        return range(first, first + max(1, count // size))

    def rows(self, parameter: str, num_rows: int) -> tuple[range, ...]:
        """Rows of a whole parameter of `num_rows` that this rank holds, in order; no rows: it holds zeros instead.

        Args:
            parameter: dotted name in the Decoder.
        """
        parallel, spec = self.parallel, self.spec
        everything = (range(num_rows),)
        if parallel.world_size == 1:
            return everything
        if ".qkv_proj." in parameter and (match := _LAYER.match(parameter)) is not None:
            return self._qkv_rows(int(match[1]))
        if (rows := self._recurrent_rows(parameter)) is not None:
            return rows
        if spec.latent is not None and ".attention.q_proj." in parameter:
            return (self._rows_of_heads(spec.latent.key_dim + spec.head_dim),)
        if spec.latent is not None and ".attention.kv_up." in parameter:
            keys, values = self._rows_of_heads(spec.latent.key_dim), self._rows_of_heads(spec.latent.value_dim)
            before = spec.num_heads * spec.latent.key_dim
            return keys, range(before + values.start, before + values.stop)
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
            return (self._kv_heads(spec.num_kv_heads),)
        if spec.qk_norm == "width" and ".q_norm." in parameter:
            return (self._rows_of_heads(spec.head_dim),)
        if spec.qk_norm == "width" and ".k_norm." in parameter:
            heads = self._kv_heads(spec.num_kv_heads)
            return (range(heads.start * spec.head_dim, heads.stop * spec.head_dim),)
        if parameter.endswith(".bias") and _ROW_SUMMED.search(parameter) and not parallel.is_leader:
            return ()
        return everything

    def _qkv_rows(self, layer: int) -> tuple[range, ...]:
        """`rows` of the projection of a layer's queries, their gates, keys and values."""
        spec = self.spec.of_layer(layer)
        count, at = spec.num_kv_heads, spec.num_heads * (2 if spec.has_attention_gate else 1)
        groups = [(start, self._heads) for start in range(0, at, spec.num_heads)]
        groups += [(at + part * count, self._kv_heads(count)) for part in range(spec.num_kv_projections(layer))]
        dim = spec.head_dim
        return tuple(range((start + heads.start) * dim, (start + heads.stop) * dim) for start, heads in groups)

    def _recurrent_rows(self, parameter: str) -> tuple[range, ...] | None:
        """`rows` of a recurrent layer's parameter that ranks share; None for other parameters."""
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
