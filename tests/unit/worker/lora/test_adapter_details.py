"""Names and shapes that few adapters have, what of them is refused, and what a GPU's store does beside its steps."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.errors import ModelLoadError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_kernels.lora.add_lora import LoraPart
from pagoda_worker.lora import peft_files, targets
from pagoda_worker.lora import store as store_module
from pagoda_worker.lora.adapter import Adapter
from pagoda_worker.lora.peft_files import MAX_HEADER_BYTES, read_adapter
from pagoda_worker.lora.store import AdapterStore
from pagoda_worker.lora.targets import LoraTargets, Target
from pagoda_worker.models.weights import WeightSource

LAYER = "layers.0.mlp.up_proj"
BASE = "base_model.model.model."


class Targets:
    """A model of one matrix [6, 4], and perhaps of two experts."""

    def __init__(self, *, experts: tuple[tuple[int, int, int, int], ...] = (), is_swapped: bool = False) -> None:
        self.asked: list[str] = []
        self._experts = [
            (self._target(f"e{n}.up", up_out, up_in, is_swapped), self._target(f"e{n}.down", down_out, down_in, False))
            for n, (up_out, up_in, down_out, down_in) in enumerate(experts)
        ]

    @staticmethod
    def _target(layer: str, rows: int, columns: int, is_swapped: bool = False) -> Target:
        source = WeightSource(name=layer, parameter=f"{layer}.weight")
        return Target(source, layer, rows, rows, columns, is_swapped=is_swapped)

    def find(self, module: str) -> Target | None:
        self.asked.append(module)
        return self._target(LAYER, 6, 4)

    def is_ignored(self, module: str) -> bool:
        return "vision" in module

    def experts(self, module: str) -> list[tuple[Target, Target]]:
        return self._experts if module.endswith("experts") else []

    def parts(self, target: Target, a: Tensor, b: Tensor) -> Iterator[LoraPart]:
        yield LoraPart.of(a, b, 0)


def write(directory: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def pair(prefix: str, suffix: str = ".weight", *, rank: int = 2) -> dict[str, Tensor]:
    return {f"{prefix}.lora_A{suffix}": torch.ones(rank, 4), f"{prefix}.lora_B{suffix}": torch.ones(6, rank)}


def read(directory: Path, given: Targets, **options: Any) -> dict[str, tuple[LoraPart, ...]]:
    more: dict[str, Any] = {"targets": given, "dtype": torch.float32, "max_rank": 8, **options}
    return read_adapter(directory, **more)


@pytest.mark.parametrize(
    ("prefix", "suffix", "module"),
    [
        (f"{BASE}a.up_proj", ".weight", "model.a.up_proj"),
        (f"{BASE}a.up_proj", ".default.weight", "model.a.up_proj"),
        (f"{BASE}a.up_proj", ".default", "model.a.up_proj"),
        (f"{BASE}a.up_proj", "", "model.a.up_proj"),
        ("model.a.up_proj", ".weight", "model.a.up_proj"),
        (f"{BASE}a.up_proj.base_layer", ".weight", "model.a.up_proj.base_layer"),
    ],
)
def test_names_of_tensors_have_several_forms(prefix: str, suffix: str, module: str, tmp_path: Path) -> None:
    given = Targets()
    scaled = write(tmp_path, pair(prefix, suffix), alpha_pattern={"up_proj": 6})
    (part,) = read(scaled, given, only=("up_proj",))[LAYER]
    assert given.asked == [module]
    assert part.matrix.unique().tolist() == [3], "patterns know a module without what peft adds to its name"


def test_modules_of_other_parts_and_names_are_left_out(tmp_path: Path) -> None:
    tensors = {**pair("vision.up_proj"), **pair("model.up_proj"), **pair("model.down_proj")}
    given = Targets()
    read(write(tmp_path, tensors), given, only=("up_proj",))
    assert given.asked == ["model.up_proj"]


def test_the_list_of_tensors_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    opened = peft_files.TensorFile

    def noted(path: Path, *, max_header_bytes: int | None = None) -> Any:
        asked.append(max_header_bytes)
        return opened(path, max_header_bytes=100)

    monkeypatch.setattr(peft_files, "TensorFile", noted)
    with pytest.raises(ModelLoadError, match=r"^cannot read .*has a header of \d+ bytes, must have at most 100$"):
        read(write(tmp_path, pair("model.up_proj")), Targets())
    assert asked == [MAX_HEADER_BYTES]


@pytest.mark.parametrize("half", ["A", "B"])
def test_numbers_of_both_halves_are_finite(half: str, tmp_path: Path) -> None:
    tensors = pair("model.up_proj")
    tensors[f"model.up_proj.lora_{half}.weight"][0, 1] = torch.inf
    with pytest.raises(ModelLoadError, match=r"lora_B\.weight or its other half has numbers that are not finite"):
        read(write(tmp_path, tensors), Targets())


def test_a_scale_is_applied_before_numbers_are_rounded(tmp_path: Path) -> None:
    tensors = pair("model.up_proj")
    tensors["model.up_proj.lora_B.weight"] *= 1e-7  # float16 has no such number
    (part,) = read(write(tmp_path, tensors, lora_alpha=2e7), Targets(), dtype=torch.float16)[LAYER]
    assert part.b.dtype == part.a.dtype == torch.float16
    assert part.matrix.unique().tolist() == [1]


EXPERTS = ((6, 4, 4, 3), (6, 4, 4, 3))


def stacked(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {"model.experts.lora_A.weight": a, "model.experts.lora_B.weight": b}


def test_both_matrices_of_experts_are_told_by_their_sizes(tmp_path: Path) -> None:
    up = read(write(tmp_path, stacked(torch.ones(4, 4), torch.ones(6, 4))), Targets(experts=EXPERTS))
    assert sorted(up) == ["e0.up", "e1.up"]
    down = read(write(tmp_path, stacked(torch.ones(2, 3), torch.ones(4, 2))), Targets(experts=EXPERTS))
    assert sorted(down) == ["e0.down", "e1.down"]
    assert [parts[0].a.shape[0] for parts in down.values()] == [1, 1]


def test_experts_that_are_stored_the_other_way_round_swap_their_halves(tmp_path: Path) -> None:
    a, b = torch.arange(12.0).view(2, 6), torch.arange(8.0).view(4, 2) + 100
    layers = read(write(tmp_path, stacked(a, b)), Targets(experts=EXPERTS, is_swapped=True))
    assert sorted(layers) == ["e0.up", "e1.up"]
    for number, (part,) in enumerate(layers[f"e{n}.up"] for n in range(2)):
        assert part.a.tolist() == [b[:, number].tolist()]
        assert part.matrix[:, 0].tolist() == a[number].tolist()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(3, 4), torch.ones(6, 3)),
        (torch.ones(4, 4), torch.ones(6, 2)),
        (torch.ones(4, 5), torch.ones(6, 4)),
    ],
    ids=["a rank that experts do not share", "halves of two ranks", "no such inputs"],
)
def test_matrices_of_experts_that_do_not_fit_are_refused(a: Tensor, b: Tensor, tmp_path: Path) -> None:
    message = rf"\[{a.shape[0]}, {a.shape[1]}\] and \[6, {b.shape[1]}\] fit no matrices of 2 experts$"
    with pytest.raises(ModelLoadError, match=message):
        read(write(tmp_path, stacked(a, b)), Targets(experts=EXPERTS))


def test_matrices_that_fit_both_of_an_expert_are_refused(tmp_path: Path) -> None:
    square = Targets(experts=((4, 4, 4, 4), (4, 4, 4, 4)))
    with pytest.raises(ModelLoadError, match="fit no matrices of 2 experts"):
        read(write(tmp_path, stacked(torch.ones(2, 4), torch.ones(4, 2))), square)


# Targets.


@pytest.mark.parametrize(
    ("fused", "layer"),
    [("qkv_proj", "qkv_proj"), ("query_key_value", "qkv_proj"), ("Wqkv", "qkv_proj"), ("gate_up_proj", "up_proj")],
)
def test_projections_that_others_fuse_have_these_names(fused: str, layer: str) -> None:
    assert targets._FUSED[fused] == layer
    sources = [
        WeightSource(name=f"layers.0.x.{name}.weight", parameter=f"layers.0.y.{layer}.weight", row_start=start)
        for start, name in enumerate(("one", "two"))
    ]
    given: Any = LoraTargets.__new__(LoraTargets)
    given._names = SimpleNamespace(sources=sources)
    given._made = {}
    found = given._other_form(f"layers.0.x.{fused}")
    assert found is not None
    assert (found.parameter, found.row_start, found.num_rows) == (f"layers.0.y.{layer}.weight", 0, None)
    assert given._other_form(f"layers.1.x.{fused}") is None


def test_parts_that_a_checkpoint_leaves_out_are_known_with_and_without_their_prefix() -> None:
    given: Any = LoraTargets.__new__(LoraTargets)
    ignored = (re.compile(r"^vision\."), re.compile(r"^model\.audio\."), re.compile(r"^lm_head\.weight$"))
    given._names = SimpleNamespace(prefixes=("model.",), ignored=ignored, lm_head="lm_head")
    modules = ("vision.a", "model.vision.a", "model.audio.a", "audio.a", "lm_head", "model.layers.0.a")
    assert [given.is_ignored(module) for module in modules] == [True, True, True, False, False, False]


# The store of a GPU.


def test_what_steps_will_copy_is_pinned_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(store_module, "read_adapter", lambda directory, **_: {LAYER: ()})
    monkeypatch.setattr(store_module, "find_adapter", Path)

    def pinned(self: Adapter) -> Adapter:
        calls.append(self.name.name)
        return self

    monkeypatch.setattr(Adapter, "pinned", pinned)
    for kind in ("cuda", "cpu"):
        store = AdapterStore(
            config=LoraConfig(enable_lora=True),
            make_targets=lambda: cast("Any", None),
            dtype=torch.float32,
            device=torch.device(kind),
        )
        store.load(1, LoraAdapter(name=kind, path="/a"))
        store.load(2, LoraAdapter(name=kind, path="/a"))
    assert calls == ["cuda"], "once"


def test_copies_run_beside_the_host() -> None:
    calls: list[Any] = []

    class Matrix:
        def to(self, device: torch.device, *, non_blocking: bool = False) -> Tensor:
            calls.append((device, non_blocking))
            return torch.ones(1, 1)

    part = LoraPart.of(torch.ones(1, 3), torch.ones(2, 1), 0)
    object.__setattr__(part, "a", Matrix())
    object.__setattr__(part, "b", Matrix())
    adapter = Adapter(name=LoraAdapter(name="a"), layers={LAYER: (part,)}, rank=1)
    adapter.to(torch.device("meta"))
    assert calls == [(torch.device("meta"), True)] * 2
