"""The adapters that requests may name: what is listed when, which weights are current, which frontends are notified."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.errors import InvalidRequest, NotFound
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.adapters import adapter_list
from pagoda_scheduler.adapters.adapter_list import AdapterList

NOW = 1000


class Changes:
    """Counts calls."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> None:
        self.number += 1


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_list, "time", SimpleNamespace(time_ns=lambda: NOW))


def adapter(name: str = "a", path: str = "/p", version: int = 0, **more: Any) -> LoraAdapter:
    return LoraAdapter(name=name, path=path, version=version, **more)


def listing(*adapters: LoraAdapter, **config: Any) -> tuple[AdapterList, Changes]:
    changes = Changes()
    made = AdapterList(config=LoraConfig(enable_lora=True, **config), on_change=changes)
    for one in adapters:
        made.put(one)
    changes.number = 0
    return made, changes


def test_those_of_the_command_line_are_there_in_order_of_name() -> None:
    made, changes = listing(lora_modules=("b=/p", "a=/p"))
    assert [one.name for one in made.listed()] == ["a", "b"]
    assert (made.get("b"), made.get("c"), made.find("a")) == (adapter("b"), None, adapter("a"))
    assert (made.is_on, made.has_resolver, changes.number) == (True, False, 0)
    with pytest.raises(NotFound, match="the adapter 'c' does not exist") as caught:
        made.find("c")
    assert caught.value.field == "lora"
    off = AdapterList(config=LoraConfig())
    assert not off.is_on
    with pytest.raises(InvalidRequest, match="lora_name is 'a', adapters need --enable-lora") as refused:
        off.candidate(adapter(), load_inplace=False)
    assert refused.value.field == "lora_name"


def test_a_candidate_changes_nothing_and_is_newer_than_what_is_known() -> None:
    made, changes = listing(adapter("b", version=5000))
    asked = adapter("a", "/new", version=7, base_model_name="base", is_pinned=True)
    found = made.candidate(asked, load_inplace=False)
    assert found == adapter("a", "/new", NOW, base_model_name="base"), "its version is ours, and no one has pinned it"
    assert (made.get("a"), changes.number) == (None, 0)
    with pytest.raises(InvalidRequest, match="lora_name is 'b', which is already loaded: set load_inplace") as caught:
        made.candidate(adapter("b", "/other"), load_inplace=False)
    assert caught.value.field == "lora_name"
    assert made.candidate(adapter("b", "/other"), load_inplace=True) == adapter("b", "/other", 5001)
    made.pin("b", is_pinned=True)
    assert made.candidate(adapter("b", "/other"), load_inplace=True).is_pinned


def test_the_list_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_list, "MAX_ADAPTERS", 2)
    made, changes = listing(adapter("a"), adapter("b"))
    with pytest.raises(
        InvalidRequest, match="lora_name is 'c', but 2 adapters are loaded, at most 2 are allowed: unload one"
    ):
        made.candidate(adapter("c"), load_inplace=False)
    assert made.candidate(adapter("b", "/other"), load_inplace=True).path == "/other"
    made.remove("a")
    made.put(made.candidate(adapter("c"), load_inplace=False))
    assert ([one.name for one in made.listed()], changes.number) == (["b", "c"], 2)


def test_a_change_is_told_and_what_is_none_is_not() -> None:
    made, changes = listing()
    for number, (given, count) in enumerate(((adapter(), 1), (adapter(), 1), (adapter(version=1), 2))):
        made.put(given)
        assert (made.get("a"), changes.number) == (given, count), number
    assert made.pin("a", is_pinned=True) == adapter(version=1, is_pinned=True)
    assert changes.number == 3
    made.pin("a", is_pinned=True)
    assert changes.number == 3
    assert not made.pin("a", is_pinned=False).is_pinned
    assert (made.remove("a"), made.listed(), changes.number) == (adapter(version=1), [], 5)
    for call in (lambda: made.remove("a"), lambda: made.pin("a", is_pinned=True)):
        with pytest.raises(NotFound):
            call()
    assert changes.number == 5


def test_newer_weights_of_an_earlier_scheduler_stand() -> None:
    made, changes = listing(adapter("a", version=5))
    made.learn([adapter("a", "/old", 4), adapter("a", "/same", 5), adapter("b", "/b", 0)])
    assert (made.find("a").path, made.find("b").path, changes.number) == ("/p", "/b", 1)
    made.learn([adapter("a", "/new", 6)])
    assert (made.find("a").path, changes.number) == ("/new", 2)
    off = AdapterList(config=LoraConfig(), on_change=changes)
    off.learn([adapter("a")])
    assert (off.listed(), changes.number) == ([], 2)


@pytest.mark.parametrize("name", ["mine", "org/mine", "with space", "v1.2-x_y+z"])
def test_names_are_found_in_the_resolver_s_directory(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    made, _ = listing(lora_resolver_dir=str(tmp_path))
    assert made.has_resolver
    found = made.candidate(adapter(name, ""), load_inplace=False)
    assert found == adapter(name, str(folder), NOW)
    made.put(found)
    assert made.candidate(adapter(name, ""), load_inplace=False) is found
    made.put(adapter(name, "/other", 3000, is_pinned=True))
    again = made.candidate(adapter(name, ""), load_inplace=True)
    assert again == adapter(name, str(folder), 3001, is_pinned=True)


@pytest.mark.parametrize(
    "name",
    ["none", "empty", "../outside", "org/../../outside", "/abs", "a/b/c", ".hidden/../x", "org/..", "-a"],
)
def test_what_is_not_there_or_outside_is_not_found(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    for folder in (inside / "empty", inside / "a" / "b" / "c", tmp_path / "outside"):
        folder.mkdir(parents=True)
    for folder in (tmp_path / "outside", inside / "a" / "b" / "c", inside, tmp_path):
        (folder / "adapter_config.json").write_text("{}")
    made, _ = listing(lora_resolver_dir=str(inside))
    with pytest.raises(NotFound, match="does not exist") as caught:
        made.candidate(adapter(name, ""), load_inplace=False)
    assert caught.value.field == "lora_name"
    without, _ = listing()
    with pytest.raises(NotFound):
        without.candidate(adapter(name, ""), load_inplace=False)
