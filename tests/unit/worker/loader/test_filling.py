"""Parameters of a small model are filled: with constants, at random, from made tensors, or where they stay."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pagoda_common.errors import ModelLoadError
from pagoda_worker.loader import weights as module
from pagoda_worker.loader.weights import fill_constants, fill_dummy_weights
from pagoda_worker.models.weights import MadeWeights, WeightNames, WeightSource

CPU = torch.device("cpu")


class Whole:
    """One rank has all."""

    def rows(self, parameter: str, count: int) -> tuple[range, ...]:
        return (range(count),)

    def columns(self, parameter: str, count: int) -> range:
        return range(count)


class Model(nn.Module):
    """A matrix, a vector and a constant, not filled yet."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("matrix", (60, 50)), ("norm", (4,)), ("table", (3,))):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
        self.sharding = Whole()
        self.constants = {"table": torch.tensor([1.0, 2.0, 3.0])}

    def dummy_value(self, name: str) -> float | None:
        return 0.5 if name == "norm" else None


def test_random_weights_are_small_and_constants_are_left_to_their_values() -> None:
    model: Any = Model()
    fill_dummy_weights(model, model, device=CPU, seed=3)
    assert model.norm.tolist() == [0.5] * 4
    assert float(model.matrix.std()) == pytest.approx(0.02, rel=0.05)
    assert float(model.matrix.mean()) == pytest.approx(0.0, abs=0.002)
    assert model.table.is_meta
    expected = torch.empty(60, 50).normal_(std=0.02, generator=torch.Generator().manual_seed(3))
    assert torch.equal(model.matrix, expected)
    fill_constants(model, device=CPU)
    assert model.table.tolist() == [1, 2, 3]


def test_a_constant_that_the_files_have_is_kept() -> None:
    model: Any = Model()
    model.table = nn.Parameter(torch.tensor([7.0, 8.0, 9.0]), requires_grad=False)
    fill_constants(model, device=CPU)
    assert model.table.tolist() == [7, 8, 9]
    assert model.matrix.is_meta


def filler_of(model: Any, made: MadeWeights) -> Any:
    names = WeightNames(sources=[], prefixes=("",), made=(made,))
    methods: Any = SimpleNamespace(is_online=False)
    return module._Filler(model, model, names, {}, device=CPU, methods=methods)


def test_made_parameters_are_all_there_and_of_their_shapes() -> None:
    model, given = Model(), [torch.ones(1)]
    results: dict[str, Tensor] = {"matrix": torch.ones(60, 50), "norm": torch.arange(4.0)}
    made = MadeWeights(names=("a", "b"), parameters=("matrix", "norm"), make=lambda tensors: results)
    filler_of(model, made).make(made, given)
    assert model.norm.tolist() == [0, 1, 2, 3]
    assert bool((model.matrix == 1).all())
    for wrong, shape in ((torch.ones(60, 49), [60, 49]), (torch.ones(59, 50), [59, 50]), (None, [])):
        model = Model()
        results = {"norm": torch.ones(4)} | ({} if wrong is None else {"matrix": wrong})
        with pytest.raises(ModelLoadError) as error:
            filler_of(model, made).make(made, given)
        assert str(error.value) == f"a, b make matrix of shape {shape}, must be [60, 50]"


def source(**fields: Any) -> WeightSource:
    return WeightSource(name="x", parameter="matrix", **fields)


def stored(shape: list[int], dtype: str = "F32", paired_rows: int = 0) -> Any:
    return module.StoredTensor(cast("Any", None), "x", shape, dtype, paired_rows)


@pytest.mark.parametrize(
    ("given", "tensor", "is_in_order"),
    [
        (source(), stored([60, 50]), True),
        (source(row_start=3, num_rows=5), stored([5, 50]), True),
        (source(is_row=True), stored([50]), True),
        (source(is_transposed=True), stored([50, 60]), False),
        (source(group_rows=(1, 2)), stored([60, 50]), False),
        (source(), stored([60, 50], paired_rows=4), False),
        (source(), stored([]), False),
        (source(), stored([60, 50], "F4"), False),
        (source(), SimpleNamespace(shape=[60, 50]), False),
    ],
)
def test_rows_that_lie_as_they_are_needed(given: WeightSource, tensor: Any, is_in_order: bool) -> None:
    assert module._is_in_order(given, tensor) is is_in_order


@pytest.mark.parametrize(
    ("given", "tensor", "place"),
    [
        (source(), stored([60, 50]), (0, 60)),
        (source(row_start=10, num_rows=5), stored([5, 50]), (10, 15)),
        (source(), stored([60, 50], "BF16"), None),
        (source(is_transposed=True), stored([50, 60]), None),
    ],
)
def test_what_is_held_as_it_is_stored_is_read_to_its_rows(
    given: WeightSource, tensor: Any, place: tuple[int, int] | None
) -> None:
    model = Model()
    made = MadeWeights(names=(), parameters=(), make=lambda tensors: {})
    found = filler_of(model, made)._place(model, "matrix", given, tensor)
    assert (found is None) is (place is None)
    assert model.matrix.is_meta is (place is None)
    if place is not None:
        found.fill_(7.0)
        rows = (model.matrix == 7.0).all(dim=1).nonzero().flatten().tolist()
        assert rows == list(range(*place))
