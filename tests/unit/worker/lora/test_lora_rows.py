"""LoraRows: which rows of a step have which adapter, and what each layer is given of it."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_kernels.lora.add_lora import NUM_FIELDS, LoraPart
from pagoda_worker.lora.adapter import Adapter
from pagoda_worker.lora.lora_rows import HEAD, LoraRows, attach

CPU = torch.device("cpu")
UP, DOWN, QKV = "layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "layers.1.self_attn.qkv_proj"
IN = 6


def part(seed: int, *, rank: int = 2, num_rows: int = 4, row_start: int = 0) -> LoraPart:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, IN, generator=generator), torch.randn(num_rows, rank, generator=generator)
    return LoraPart.of(a, b, row_start)


def adapter(name: str, layers: dict[str, tuple[LoraPart, ...]]) -> Adapter:
    return Adapter.of(LoraAdapter(name=name), layers)


@pytest.fixture
def rows() -> LoraRows:
    rows = LoraRows(CPU)
    rows.know([UP, DOWN, QKV, HEAD])
    return rows


@pytest.fixture
def two() -> list[Adapter]:
    """One changes two parts of a layer and another layer, the other one changes one of both."""
    first = adapter("first", {UP: (part(1), part(2, rank=3, num_rows=2, row_start=6)), QKV: (part(3),)})
    return [first, adapter("second", {UP: (part(4, rank=1, row_start=3),)})]


def counts(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def expected(x: Tensor, of_rows: list[Adapter | None], layer: str) -> Tensor:
    out = torch.zeros(x.shape[0], 8)
    for row, owner in enumerate(of_rows):
        for one in owner.layers.get(layer, ()) if owner is not None else ():
            out[row, one.row_start : one.row_start + one.num_rows] += one.matrix @ (one.a @ x[row])
    return out


def added(rows: LoraRows, x: Tensor, layer: str) -> Tensor:
    return rows.add(layer, x, torch.zeros(x.shape[0], 8))


@pytest.mark.parametrize("layer", [UP, DOWN, QKV])
def test_each_row_gets_what_its_adapter_adds(rows: LoraRows, two: list[Adapter], layer: str) -> None:
    first, second = two
    rows.begin([second, None, first, second], counts(2, 1, 3, 1))
    owners = [second] * 2 + [None] + [first] * 3 + [second]
    x = torch.randn(7, IN, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(added(rows, x, layer), expected(x, owners, layer))
    chosen = np.array([6, 0, 2, 4])
    with rows.selected(chosen):
        torch.testing.assert_close(
            added(rows, x[chosen], layer), expected(x[chosen], [owners[r] for r in chosen], layer)
        )
        with rows.selected(np.array([3, 1])):
            torch.testing.assert_close(
                added(rows, x[chosen][[3, 1]], layer), expected(x[chosen][[3, 1]], [first, second], layer)
            )
    torch.testing.assert_close(added(rows, x, layer), expected(x, owners, layer))


def test_a_step_without_adapters_adds_nothing(rows: LoraRows, two: list[Adapter]) -> None:
    rows.begin(two, counts(1, 1))
    for adapters in ([], [None, None]):
        rows.begin(adapters, counts(1, 1))
        assert rows.grouped is None
        assert not added(rows, torch.ones(2, IN), UP).any()
        assert rows.rows_within("layers.0.mlp").tolist() == []
        with rows.selected(np.array([1])):
            assert rows.grouped is None


def test_rows_without_an_adapter_alone_are_no_group(rows: LoraRows, two: list[Adapter]) -> None:
    rows.begin([two[0], None], counts(1, 2))
    with rows.selected(np.array([1, 2])):
        assert rows.grouped is None
    assert rows.grouped is not None
    assert rows.grouped.rows.tolist() == [0]


def test_the_matrices_of_the_step_before_are_kept_while_the_adapters_are_the_same(
    rows: LoraRows, two: list[Adapter]
) -> None:
    first, second = two
    rows.begin([first, second], counts(1, 1))
    matrices = rows.matrices
    rows.begin([second, first, None], counts(1, 1, 1))
    assert rows.matrices is matrices
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(added(rows, x, UP), expected(x, [second, first, None], UP))
    rows.begin([second], counts(1))
    assert rows.matrices is not matrices
    assert rows.matrices.adapters == (second,)
    torch.testing.assert_close(added(rows, x[:1], UP), expected(x[:1], [second], UP))


def test_rows_of_a_module_are_those_whose_adapter_changes_some_layer_in_it(rows: LoraRows, two: list[Adapter]) -> None:
    first, second = two
    rows.begin([second, None, first], counts(2, 1, 2))
    found = {module: rows.rows_within(module).tolist() for module in ("layers.0.mlp", "layers.1", "layers.1.mlp", UP)}
    assert found == {"layers.0.mlp": [0, 1, 3, 4], "layers.1": [3, 4], "layers.1.mlp": [], UP: []}


def test_a_table_has_a_line_for_each_part_of_each_layer(rows: LoraRows, two: list[Adapter]) -> None:
    first, second = two
    rows.begin([first, second], counts(1, 1))
    matrices = rows.matrices
    assert matrices.fields.shape == (2, 4, 2, NUM_FIELDS)
    fields = matrices.fields.tolist()
    assert [tuple(line) for line in fields[0][0]] == [one.fields for one in first.layers[UP]]
    assert [tuple(line) for line in fields[1][0]] == [second.layers[UP][0].fields, (0,) * NUM_FIELDS]
    assert tuple(fields[0][2][0]) == first.layers[QKV][0].fields
    assert not any(map(any, fields[0][1]))
    assert matrices.layers == {UP, QKV}
    assert matrices.places_of([UP, DOWN, QKV]) == [0, -1, 2, -1]
    assert matrices.places_of([UP, UP, UP, QKV]) == [0, 0, 0, 2]
    table = matrices.table(UP)
    assert table is not None
    assert (table.max_rank, table.max_rows) == (3, 4)
    assert [len(parts) for parts in table.parts] == [2, 1]
    assert torch.equal(table.fields, matrices.fields[:, 0])
    assert matrices.table(UP) is table
    of_qkv = matrices.table(QKV)
    assert of_qkv is not None
    assert [len(parts) for parts in of_qkv.parts] == [1, 0]
    assert (of_qkv.max_rank, of_qkv.max_rows) == (3, 4)
    assert matrices.table(DOWN) is None


def test_rows_of_a_table_of_embeddings_get_the_columns_of_their_ids(rows: LoraRows) -> None:
    vocab, dim = 5, 8
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, vocab, generator=generator), torch.randn(dim, 2, generator=generator)
    owner = adapter("table", {UP: (LoraPart.of(a, b, 0),)})
    rows.begin([None, owner], counts(1, 2))
    ids = torch.tensor([4, 1, 3])
    out = rows.embed(UP, ids, torch.ones(3, dim))
    assert torch.equal(out[0], torch.ones(dim))
    torch.testing.assert_close(out[1:], 1 + (b @ a[:, [1, 3]]).T)
    assert torch.equal(rows.embed(DOWN, ids, torch.ones(3, dim)), torch.ones(3, dim))


class Layer(nn.Module):
    """One that asks for adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.lora: LoraRows | None = None
        self.lora_name = ""


def test_every_layer_that_asks_is_given_its_name_and_place() -> None:
    model = nn.ModuleDict({"one": Layer(), "plain": nn.Linear(2, 2), "two": nn.ModuleDict({"inner": Layer()})})
    rows = LoraRows(CPU)
    attach(model, rows)
    one, inner = model["one"], model["two"]["inner"]  # type: ignore[index]  # a ModuleDict, too
    assert (one.lora, one.lora_name, inner.lora, inner.lora_name) == (rows, "one", rows, "two.inner")
    assert rows._places == {"one": 0, "two.inner": 1, HEAD: 2}
    with_head = nn.ModuleDict({HEAD: Layer(), "last": Layer()})
    attach(with_head, rows)
    assert rows._places == {HEAD: 0, "last": 1}
