"""PlanSharding: a rank's part of a transformers module's parameters, by the module's tensor-parallel plan."""

from torch import nn

from pagoda_worker.models.transformers_model.hosted_layers import COLUMN, GATHER, ROW, hosted_linears
from pagoda_worker.parallel.tensor_parallel import TensorParallel


class PlanSharding:
    """A WeightSharding by the styles of hosted layers; parameters without a style are on every rank."""

    def __init__(self, model: nn.Module, parallel: TensorParallel) -> None:
        """`model`: its module names are those of parameters."""
        self._parallel = parallel
        self._styles = {name: layer.style for name, layer in hosted_linears(model) if layer.style is not None}

    def rows(self, parameter: str, num_rows: int) -> tuple[range, ...]:
        """See WeightSharding."""
        owner, _, leaf = parameter.rpartition(".")
        style = self._styles.get(owner)
        if style in (COLUMN, GATHER):
            return (self._parallel.part(num_rows),)
        if style == ROW and leaf == "bias" and not self._parallel.is_leader:
            return ()
        return (range(num_rows),)

    def columns(self, parameter: str, num_columns: int) -> range:
        """See WeightSharding."""
        owner = parameter.rpartition(".")[0]
        return self._parallel.part(num_columns) if self._styles.get(owner) == ROW else range(num_columns)
