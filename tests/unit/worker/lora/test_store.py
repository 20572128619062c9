"""AdapterStore: which adapters are in memory, on which device, and which go first."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.errors import ModelLoadError, NotFound
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_kernels.lora.add_lora import LoraPart
from pagoda_worker.lora import store as module
from pagoda_worker.lora.adapter import Adapter
from pagoda_worker.lora.store import AdapterStore, find_adapter

CPU = torch.device("cpu")
META = torch.device("meta")
"""A device that is none: copies to it are copies all the same."""


def part(rank: int = 2, num_rows: int = 4, row_start: int = 0) -> LoraPart:
    return LoraPart.of(torch.ones(rank, 3), torch.ones(num_rows, rank), row_start)


def name(text: str, version: int = 0) -> LoraAdapter:
    return LoraAdapter(name=text, path=f"/adapters/{text}", version=version)


class Reader:
    """Stands for the reading of files; notes how it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Path, dict[str, Any]]] = []
        self.num_targets = 0

    def read(self, directory: Path, **given: Any) -> dict[str, tuple[LoraPart, ...]]:
        self.asked.append((directory, given))
        return {"layers.0.mlp.up_proj": (part(),)}

    def make_targets(self) -> Any:
        self.num_targets += 1
        return f"targets {self.num_targets}"


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    reader = Reader()
    monkeypatch.setattr(module, "read_adapter", reader.read)
    monkeypatch.setattr(module, "find_adapter", Path)
    return reader


def store_of(reader: Reader, *, device: torch.device = CPU, **config: Any) -> AdapterStore:
    config = {"max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 16, **config}
    return AdapterStore(
        config=LoraConfig(enable_lora=True, **config),
        make_targets=cast("Any", reader.make_targets),
        dtype=torch.bfloat16,
        device=device,
    )


def test_an_adapter_is_read_once_with_the_bounds_of_the_worker(reader: Reader) -> None:
    store = store_of(reader, lora_target_modules=("q_proj",))
    first = store.load(5, name("sql"))
    assert store.load(6, name("sql")) is first
    store.load(7, name("chat"))
    given = {"dtype": torch.bfloat16, "max_rank": 16, "only": ("q_proj",), "targets": "targets 1"}
    assert reader.asked == [(Path("/adapters/sql"), given), (Path("/adapters/chat"), given)]
    assert reader.num_targets == 1
    assert (first.name, first.rank, store.get(5), store.get(6), store.get(8)) == (name("sql"), 2, first, first, None)


def test_another_version_is_another_adapter(reader: Reader) -> None:
    store = store_of(reader)
    assert store.load(1, name("sql")) is not store.load(2, name("sql", version=1))
    assert len(reader.asked) == 2


def test_what_has_no_number_goes_when_there_is_no_room_the_longest_unused_first(reader: Reader) -> None:
    store = store_of(reader)
    for number, text in enumerate("abc"):
        store.load(number, name(text))
    store.forget_numbers()
    assert store.get(0) is None
    store.load(1, name("a"))  # it was there
    assert len(reader.asked) == 3
    store.load(2, name("d"))
    assert [key[0] for key in store._by_key] == ["c", "a", "d"]
    store.load(3, name("e"))
    assert [key[0] for key in store._by_key] == ["a", "d", "e"]
    store.load(4, name("f"))
    assert [key[0] for key in store._by_key] == ["a", "d", "e", "f"], "a scheduler has asked for each of these"


def test_one_that_is_removed_is_gone_unless_it_has_another_number(reader: Reader) -> None:
    store = store_of(reader)
    adapter = store.load(1, name("a"))
    store.load(2, name("a"))
    store.pin(1, is_pinned=True)
    store.remove(1)
    assert (store.get(1), store.get(2), store._pinned) == (None, adapter, {adapter})
    store.remove(2)
    store.remove(2)
    assert (store.get(2), store._by_key, store._pinned) == (None, {}, set())
    assert store.load(3, name("a")) is not adapter


def test_on_a_device_are_those_that_were_used_last_and_pinned_ones(reader: Reader) -> None:
    store = store_of(reader, device=META)
    adapters = [store.load(number, name(text)) for number, text in enumerate("abc")]
    a, b, c = adapters
    copy = store.on_device(a)
    assert copy is not a
    assert copy.layers["layers.0.mlp.up_proj"][0].a.device == META
    assert (copy.name, copy.rank, copy.owners) == (a.name, a.rank, a.owners)
    assert store.on_device(a) is copy
    store.on_device(b)
    store.on_device(a)
    store.on_device(c)
    assert list(store._on_device) == [a, c], "b was used before a"
    assert [is_there for _, _, is_there in store.listed()] == [True, False, True]
    store.pin(0, is_pinned=True)
    store.on_device(b)
    assert list(store._on_device) == [a, b]
    store.pin(1, is_pinned=True)
    store.on_device(c)
    assert list(store._on_device) == [b, c], "all are pinned: the oldest goes"
    store.pin(1, is_pinned=False)
    store.on_device(a)
    assert list(store._on_device) == [c, a]
    store.remove(2)
    assert list(store._on_device) == [a]


def test_a_cpu_computes_with_what_is_in_its_memory(reader: Reader) -> None:
    store = store_of(reader)
    adapter = store.load(3, name("a"))
    other = store.load(1, name("b"))
    assert store.on_device(adapter) is adapter
    assert store.listed() == [(1, other, True), (3, adapter, True)]


def test_an_unknown_number_cannot_be_pinned(reader: Reader) -> None:
    store = store_of(reader)
    with pytest.raises(NotFound, match="adapter 4 is not loaded") as caught:
        store.pin(4, is_pinned=True)
    assert caught.value.field == "number"
    adapter = store.load(4, name("a"))
    store.pin(4, is_pinned=True)
    store.forget_numbers()
    assert (store._pinned, store.listed()) == (set(), [])
    assert store.load(1, name("a")) is adapter


def test_steps_may_ask_while_an_adapter_is_read(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    store, begun, gate = store_of(reader), threading.Event(), threading.Event()
    first = store.load(1, name("a"))

    def slow(directory: Path, **given: Any) -> dict[str, tuple[LoraPart, ...]]:
        begun.set()
        assert gate.wait(240)
        return {}

    monkeypatch.setattr(module, "read_adapter", slow)
    thread = threading.Thread(target=store.load, args=(2, name("b")))
    thread.start()
    assert begun.wait(240)
    assert (store.get(1), store.get(2), len(store.listed())) == (first, None, 1)
    store.remove(1)
    gate.set()
    thread.join(240)
    assert store.get(2) is not None


def test_a_place_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_adapter(str(tmp_path)) == tmp_path
    given: list[dict[str, Any]] = []

    def fetch(path: str, **more: Any) -> str:
        given.append({"path": path, **more})
        if path == "org/none":
            raise ValueError("no such repository\nwith more")
        if path == "org/silent":
            raise KeyError
        return str(tmp_path / "fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr(module, "resolve_model", lambda path: path)
    assert find_adapter("org/some") == tmp_path / "fetched"
    assert given == [
        {"path": "org/some", "allow_patterns": ["adapter_config.json", "adapter_model.safetensors"]},
    ]
    reason = "adapter 'org/none' is neither a directory nor could it be fetched from the hub: ValueError: no such repos"
    with pytest.raises(ModelLoadError, match=f"^{reason}itory$"):
        find_adapter("org/none")
    with pytest.raises(ModelLoadError, match=r"KeyError: $"):
        find_adapter("org/silent")


# Adapter.


def test_an_adapter_knows_its_rank_its_size_and_the_modules_that_it_changes() -> None:
    parts = {"layers.0.mlp.up_proj": (part(2, 4), part(5, 70, 10)), "lm_head": (part(3),)}
    adapter = Adapter.of(name("a"), parts)
    assert adapter.rank == 5
    assert adapter.owners == {"layers", "layers.0", "layers.0.mlp"}
    # float32: a is [rank, 3], b is whole panels of 64 rows.
    assert adapter.num_bytes == 4 * (2 * 3 + 2 * 64 + 5 * 3 + 5 * 128 + 3 * 3 + 3 * 64)
    assert Adapter.of(name("a"), {}).rank == 0
    moved = adapter.to(META)
    assert [(one.row_start, one.num_rows) for one in moved.layers["layers.0.mlp.up_proj"]] == [(0, 4), (10, 70)]
    assert moved.num_bytes == adapter.num_bytes
    assert adapter != Adapter.of(name("a"), parts)
