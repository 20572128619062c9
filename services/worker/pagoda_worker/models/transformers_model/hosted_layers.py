"""Replaces a transformers module's layers by Pagoda's, whose matrices may be packed, quantized and divided among ranks.
Knows modules and tensor-parallel plans; no checkpoints."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_worker.models.layers import Embedding, Linear
from pagoda_worker.models.transformers_model.attention import CURRENT, Probe
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel

COLUMN, ROW, GATHER = "colwise", "rowwise", "colwise_gather_output"
"""Supported styles of a plan: divided outputs, divided inputs, divided outputs that the leader gathers."""
_STYLES = {COLUMN: COLUMN, ROW: ROW, GATHER: GATHER, "colwise_rep": GATHER}


class Hosted(nn.Module):
    """A module that can take parameters of another one."""

    def tie(self, leaf: str, owner: nn.Module, source: str) -> None:
        """Use the parameter `source` of `owner` as `leaf`."""
        self._parameters.pop(leaf, None)
        self.__dict__.setdefault("_tied", {})[leaf] = owner, source

    def __getattr__(self, name: str) -> Any:
        """Names of all parameters, tied ones included. A module that reads a matrix itself keeps it as stored."""
        tied = self.__dict__.get("_tied", {})
        if name in tied:
            owner, source = tied[name]
            return getattr(owner, source)
        if name == "weight" and isinstance(CURRENT.running, Probe):
            self.is_multiplied = False
        return super().__getattr__(name)


class HostedLinear(Hosted, Linear):
    """A projection of a transformers module."""

    def __init__(
        self,
        *,
        in_features: int,
        out_features: int,
        bias: bool,
        prefix: str,
        style: str | None = None,
        parallel: TensorParallel = ALONE,
        is_transposed: bool = False,
    ) -> None:
        """
        Args:
            in_features, out_features: of the whole.
            style: how ranks divide it; None: each rank has the whole.
            is_transposed: a checkpoint stores it [in, out].
        """
        self.out_features = out_features if style not in (COLUMN, GATHER) else len(parallel.part(out_features))
        self.in_features = in_features if style != ROW else len(parallel.part(in_features))
        super().__init__(in_features=self.in_features, out_features=self.out_features, bias=bias, prefix=prefix)
        self.is_transposed = is_transposed
        self.style = style
        self._total = out_features
        self._parallel = parallel

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., in_features] to [..., out_features], summed or gathered over ranks by the style."""
        if isinstance(CURRENT.running, Probe):
            if x.shape[-1] != self.in_features:
                raise ModelLoadError(f"its ranks do not share {self.prefix} as its plan says")
            width = self._total if self.style == GATHER else self.out_features
            return x.new_zeros((*x.shape[:-1], width))
        rows = x.reshape(-1, self.in_features)
        out = self.multiply(rows, residual)
        if self.style == ROW:
            out = self._parallel.all_reduce(out)
        elif self.style == GATHER:
            out = self._parallel.gather_columns(out, self._total)
        return out.view(*x.shape[:-1], out.shape[-1])


class HostedEmbedding(Hosted, Embedding):
    """A table of a transformers module."""

    def __init__(self, *, num_rows: int, dim: int, is_head: bool, prefix: str) -> None:
        super().__init__(num_rows=num_rows, dim=dim, is_head=is_head, prefix=prefix)
        self.num_embeddings, self.embedding_dim = num_rows, dim

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 to [..., dim]."""
        if isinstance(CURRENT.running, Probe):
            return torch.zeros((*ids.shape, self.columns), dtype=self.dtype, device=ids.device)
        return super().forward(ids.reshape(-1)).view(*ids.shape, self.columns)


class TiedHead(Hosted):
    """A head that is tied to an embedding."""

    def __init__(self, table: nn.Module, *, num_rows: int, bias: nn.Parameter | None, parallel: TensorParallel) -> None:
        super().__init__()
        self._table = (table,)  # in a tuple: it is no part of this module
        self.tie("weight", table, "weight")
        self._num_rows = num_rows
        self._parallel = parallel
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., num_rows]."""
        table = self._table[0]
        if isinstance(CURRENT.running, Probe):
            return x.new_zeros((*x.shape[:-1], self._num_rows))
        rows = x.reshape(-1, x.shape[-1])
        if isinstance(table, HostedEmbedding) and self._parallel.world_size == 1:
            out = table.method.apply(table, rows, bias=self.bias)
        else:
            held = self._parallel.part(self._num_rows)
            bias = None if self.bias is None else self.bias[held.start : held.stop]
            out = F.linear(rows, self.weight[held.start : held.stop], bias)
            out = self._parallel.gather_columns(out, self._num_rows)
        return out.view(*x.shape[:-1], out.shape[-1])


def host_layers(model: PreTrainedModel, *, prefix: str, parallel: TensorParallel) -> None:
    """Replace projections and tables, and heads that are tied to tables.

    Raises:
        ConfigError: the ranks cannot share a projection.
    """
    styles = _plan(model) if parallel.world_size > 1 else {}
    tied = dict(model.all_tied_weights_keys)
    tables = {source.rpartition(".")[0] for source in tied.values()}
    for name, module in list(model.named_modules()):
        hosted: nn.Module | None = None
        if f"{name}.weight" in tied:
            continue
        if type(module) is nn.Linear or type(module) is Conv1D:
            hosted = _linear(name, module, _style(styles, name), prefix, parallel)
        elif type(module) is nn.Embedding:
            hosted = HostedEmbedding(
                num_rows=module.num_embeddings,
                dim=module.embedding_dim,
                is_head=name in tables and parallel.world_size == 1,
                prefix=f"{prefix}{name}",
            )
        if hosted is not None:
            _put(model, name, hosted)
    for target, source in sorted(tied.items(), reverse=True):  # weights before biases: they replace modules
        _tie(model, target, source, parallel)


def _linear(
    name: str, module: nn.Module, style: str | None, prefix: str, parallel: TensorParallel
) -> HostedLinear | None:
    is_transposed = isinstance(module, Conv1D)
    shape = list(module.get_parameter("weight").shape)
    out_features, in_features = reversed(shape) if is_transposed else shape
    total = in_features if style == ROW else out_features
    if style in (ROW, COLUMN) and total % parallel.world_size:
        raise ConfigError(
            f"world_size is {parallel.world_size}, must divide the {total} values of {name}", field="world_size"
        )
    return HostedLinear(
        in_features=int(in_features),
        out_features=int(out_features),
        bias=module.bias is not None,
        prefix=f"{prefix}{name}",
        style=style,
        parallel=parallel,
        is_transposed=is_transposed,
    )


def _tie(model: nn.Module, target: str, source: str, parallel: TensorParallel) -> None:
    """Tie a parameter to that of another module."""
    name, _, leaf = target.rpartition(".")
    owner, _, source_leaf = source.rpartition(".")
    module, other = model.get_submodule(name), model.get_submodule(owner)
    if module is other:
        return
    if isinstance(module, nn.Linear) and leaf == "weight":
        _put(model, name, TiedHead(other, num_rows=module.out_features, bias=module.bias, parallel=parallel))
    elif isinstance(module, nn.Embedding):
        _put(model, name, other)
    elif isinstance(module, Hosted):
        module.tie(leaf, other, source_leaf)


def _plan(model: PreTrainedModel) -> Mapping[str, str]:
    """Styles by pattern. Only the leader gets all outputs of a divided head; layers whose outputs every rank needs are
    not divided."""
    body = f"{model.base_model_prefix}."
    return {
        name: _STYLES[style]
        for name, style in (model._tp_plan or {}).items()
        if style in _STYLES and not (_STYLES[style] == GATHER and name.startswith(body))
    }


def _style(styles: Mapping[str, str], name: str) -> str | None:
    for pattern, style in styles.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return None


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)


def hosted_linears(model: nn.Module) -> Iterator[tuple[str, HostedLinear]]:
    """By name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, HostedLinear))
