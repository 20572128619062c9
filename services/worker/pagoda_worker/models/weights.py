"""Where each parameter of the decoder core comes from in a checkpoint. Names only, no tensors."""

import re
from dataclasses import dataclass

from pagoda_worker.models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """One tensor of a checkpoint, and the rows of the parameter that it fills."""

    name: str
    """In the checkpoint, without the optional prefix of the family."""
    parameter: str
    """Dotted name in the Decoder."""
    row_start: int = 0
    """First row of the parameter that it fills."""
    num_rows: int | None = None
    """Rows it fills; None is all."""
    is_transposed: bool = False
    """Stored [in, out] (GPT-2's Conv1D)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightNames:
    """All tensors of a family's checkpoint."""

    sources: list[WeightSource]
    prefixes: tuple[str, ...]
    """Prefixes that a checkpoint may or may not have before these names; the first is written by transformers."""
    ignored: tuple[re.Pattern[str], ...] = ()
    """Tensors that may be there and mean nothing."""


INV_FREQ = re.compile(r"rotary_emb\.inv_freq$")
LM_HEAD = re.compile(r"^lm_head\.weight$")


def linear(
    name: str,
    parameter: str,
    *,
    bias: bool,
    row_start: int = 0,
    num_rows: int | None = None,
    is_transposed: bool = False,
) -> list[WeightSource]:
    """Weight and bias of one projection."""
    sources = [
        WeightSource(
            name=f"{name}.weight",
            parameter=f"{parameter}.weight",
            row_start=row_start,
            num_rows=num_rows,
            is_transposed=is_transposed,
        )
    ]
    if bias:
        sources.append(
            WeightSource(name=f"{name}.bias", parameter=f"{parameter}.bias", row_start=row_start, num_rows=num_rows)
        )
    return sources


def qkv(spec: DecoderSpec, parent: str, parameter: str) -> list[WeightSource]:
    """q_proj, k_proj and v_proj, fused in this order."""
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sources = []
    for name, row_start, num_rows in (("q", 0, query), ("k", query, key), ("v", query + key, key)):
        sources += linear(
            f"{parent}.{name}_proj", f"{parameter}.qkv_proj", bias=spec.qkv_bias, row_start=row_start, num_rows=num_rows
        )
    return sources


def norm(spec: DecoderSpec, name: str, parameter: str) -> list[WeightSource]:
    """Weight and, for layer norms, bias."""
    if not spec.norm_has_weights:
        return []
    return linear(name, parameter, bias=spec.norm == "layer_norm")
