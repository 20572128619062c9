"""LoraTargets: maps modules of a PEFT checkpoint to layers, and cuts a rank's part from their matrices."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagoda_kernels.lora.add_lora import LoraPart
from pagoda_worker.loader.held_parts import in_order
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.layers import Embedding, Matrix
from pagoda_worker.models.model import Model
from pagoda_worker.models.weights import WeightNames, WeightSource

_FUSED: Mapping[str, str] = {
    "qkv_proj": "qkv_proj",
    "query_key_value": "qkv_proj",
    "Wqkv": "qkv_proj",
    "gate_up_proj": "up_proj",
}
"""Projections that are fused in some checkpoints, by the layer that holds them here."""
_SPLIT: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("up_proj", 0),
    "up_proj": ("up_proj", 1),
}
"""The reverse: the layer of a projection, and its index there."""
_EXPERTS = re.compile(r"layers\.(\d+)\.(?:[^.]+\.)*experts$")
_ROUTER = re.compile(r"layers\.(\d+)\.mlp\.gate$")


@dataclass(frozen=True, slots=True)
class Target:
    """The place of an adapter's module in the model."""

    source: WeightSource
    """Parameter and rows that the module changes."""
    layer: str
    """Dotted name of the layer."""
    num_rows: int
    """Number of rows of the whole parameter."""
    out_features: int
    in_features: int
    is_table: bool = False
    """Whether rows are looked up instead of multiplied."""
    pairs_rows: bool = False
    """See MadeWeights; so is is_swapped."""
    is_swapped: bool = False


class LoraTargets:
    """The matrices of a model (or of a rank's part) that adapters may change."""

    def __init__(self, *, model: Model, whole: Model, names: WeightNames) -> None:
        """
        Args:
            whole: the model of all ranks, without weights; the model itself for one rank.
            names: of the model's checkpoint.
        """
        self._model = model
        self._whole = whole
        self._names = names
        self._sources = {source.name: source for source in names.sources}
        self._sources |= {module: self._sources[name] for module, name in names.module_names.items()}
        made = names.made + (model.ways_to_make if isinstance(model, Decoder) else ())
        self._made = {parameter: one for one in made for parameter in one.parameters}

    def find(self, module: str) -> Target | None:
        """The target of a module by its name in transformers; None if adapters cannot change it."""
        name = self._stripped(module)
        source = self._sources.get(f"{name}.weight") or self._head(name) or self._other_form(name)
        return None if source is None else self._target(source)

    def is_ignored(self, module: str) -> bool:
        """Whether a module is in a part of the checkpoint that this model leaves out, such as the vision part."""
        return any(rule.search(f"{name}.weight") for name in (module, self._stripped(module)) for rule in self._ignored)

    @property
    def _ignored(self) -> tuple[re.Pattern[str], ...]:
        head = re.escape(self._names.lm_head)
        return tuple(rule for rule in self._names.ignored if head not in rule.pattern)

    def experts(self, module: str) -> list[tuple[Target, Target]]:
        """The two matrices of each expert, if the module has those of all experts in one; else empty."""
        match = _EXPERTS.search(module)
        if match is None:
            return []
        prefix = f"layers.{match[1]}.mlp.experts"
        found: list[tuple[Target, Target]] = []
        while f"{prefix}.{len(found)}.up_proj.weight" in self._parameters:
            pair = (self._whole_of(f"{prefix}.{len(found)}.{layer}") for layer in ("up_proj", "down_proj"))
            up, down = pair
            if up is None or down is None:
                return []
            found.append((self._as_made(up), self._as_made(down)))
        return found

    def _as_made(self, target: Target) -> Target:
        """With the way in which a checkpoint stacks it."""
        made = self._made.get(target.source.parameter)
        return target if made is None else replace(target, pairs_rows=made.pairs_rows, is_swapped=made.is_swapped)

    def parts(self, target: Target, a: Tensor, b: Tensor) -> Iterator[LoraPart]:
        """This rank's part of a module's matrices.

        Args:
            a: [rank, in_features] of the whole.
            b: [out_features, rank].
        """
        source, sharding = target.source, self._model.sharding
        if not target.is_table:
            columns = sharding.columns(source.parameter, a.shape[1])
            a = a[:, columns.start : columns.stop]
        b = in_order(b, replace(source, is_transposed=False))
        if target.pairs_rows:
            b = torch.cat((b[0::2], b[1::2]))
        if target.is_table:
            yield LoraPart.of(a, b, 0)
            return
        offset = 0
        for rows in sharding.rows(source.parameter, target.num_rows):
            begin = max(rows.start, source.row_start)
            end = min(rows.stop, source.row_start + b.shape[0])
            if begin < end:
                held = b[begin - source.row_start : end - source.row_start]
                yield LoraPart.of(a, held, offset + begin - rows.start)
            offset += len(rows)

    @property
    def _parameters(self) -> set[str]:
        return {*(source.parameter for source in self._names.sources), *self._made}

    def _stripped(self, module: str) -> str:
        for prefix in self._names.prefixes:
            if module.startswith(prefix):
                return module.removeprefix(prefix)
        return module

    def _target(self, source: WeightSource) -> Target | None:
        layer = source.parameter.removesuffix(".weight")
        if layer == "lm_head" and isinstance(self._whole, Decoder):
            spec = self._whole.spec
            columns = spec.embedding_dim or spec.hidden_size
            return Target(source, layer, spec.vocab_size, spec.vocab_size, columns)
        module = self._whole.get_submodule(layer)
        if not isinstance(module, Matrix) or not module.takes_adapters:
            return None
        rows = module.rows if source.num_rows is None else source.num_rows
        if isinstance(module, Embedding):
            return Target(source, layer, module.rows, module.columns, module.rows, is_table=True)
        return Target(source, layer, module.rows, rows, module.columns)

    def _whole_of(self, layer: str) -> Target | None:
        """All rows of a layer."""
        return self._target(WeightSource(name=layer, parameter=f"{layer}.weight"))

    def _head(self, name: str) -> WeightSource | None:
        """The target of a head that is tied to the embedding table."""
        is_head = name == self._names.lm_head and isinstance(self._model, Decoder)
        return WeightSource(name=name, parameter="lm_head.weight") if is_head else None

    def _other_form(self, name: str) -> WeightSource | None:
        """The target of projections that only one of the adapter's and the model's checkpoints fuses."""
        owner, _, leaf = name.rpartition(".")
        if (router := _ROUTER.search(name)) is not None:
            return self._only(f"layers.{router[1]}.mlp.router")
        siblings = [source for source in self._names.sources if source.name.startswith(f"{owner}.")]
        if leaf in _FUSED:
            layers = {
                source.parameter.removesuffix(".weight")
                for source in siblings
                if source.parameter.endswith(f".{_FUSED[leaf]}.weight")
            }
            return self._only(layers.pop()) if len(layers) == 1 else None
        if leaf in _SPLIT:
            wanted, place = _SPLIT[leaf]
            for source in siblings:
                is_joined = source.num_rows is None and source.name.split(".")[-2] not in _SPLIT
                if is_joined and source.parameter.endswith(f".{wanted}.weight"):
                    return self._part(source, wanted, place)
        return None

    def _only(self, layer: str) -> WeightSource | None:
        parameter = f"{layer}.weight"
        return WeightSource(name=layer, parameter=parameter) if parameter in self._parameters else None

    def _part(self, source: WeightSource, layer: str, place: int) -> WeightSource | None:
        """The target of one of the projections that are stacked in a tensor of the checkpoint."""
        if not isinstance(self._whole, Decoder) or source.group_rows:
            return None
        spec = self._whole.spec
        if layer == "qkv_proj":
            query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
            sizes = [query, key, key]
        else:
            module = self._whole.get_submodule(source.parameter.removesuffix(".weight"))
            assert isinstance(module, Matrix), "it has a weight of rows"
            sizes = [module.rows // 2] * 2
        return replace(source, row_start=sum(sizes[:place]), num_rows=sizes[place])
