"""Whose kernels compute a step's attention: who is right, who was measured to be the fastest, what is remembered."""

import importlib.machinery
import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.config.engine_config import AttentionBackend, CacheConfig, EngineConfig, ModelConfig
from pagoda_common.errors import ConfigError
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.external.adapter import Adapter, AttentionNeeds, Scoring
from pagoda_kernels.external.flash_attn import FlashAttention
from pagoda_kernels.external.flashinfer import FlashInferAttention
from pagoda_scheduler.rpc.convert import worker_config_to_proto
from pagoda_worker.attention import choice as attention_choice
from pagoda_worker.attention.choice import (
    AttentionChoice,
    choose_attention,
    found_right,
    measured_choice,
    scorings,
    table_key,
)
from pagoda_worker.attention.measurement import CHECKED, Lens, StepBounds, steps_to_measure
from pagoda_worker.attention.table import AttentionTable, StepShape, load_table, shape_of
from pagoda_worker.memory.device import check_attention_backend
from pagoda_worker.models.decoder import attention_layers
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.rpc.convert import engine_config_from_proto
from pagoda_worker.worker import Worker
from tests.unit.worker.attention.attention_packages import NEEDS, install_packages

CPU = torch.device("cpu")
SPEC = DecoderSpec(
    architecture="some",
    vocab_size=100,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    max_position_embeddings=100,
    activation="silu",
    windows=(7, None),
)
BOUNDS = StepBounds(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    install_packages(monkeypatch)


class Clock:
    """Times calls by who is asked to compute: 2 s for our kernels, else what `seconds` says of a name and kind."""

    def __init__(self, seconds: Callable[[str, str], float]) -> None:
        self._seconds = seconds
        self.num_calls = 0

    def __call__(self, run: Callable[[], object]) -> float:
        self.num_calls += 1
        if self.num_calls < 4:
            run()
        batch, adapter = run.func.__self__, run.args[0]  # type: ignore[attr-defined]  # a partial of Batch.attend
        return 2.0 if adapter is None else self._seconds(adapter.name, batch.shape.kind)


def lens(query_lens: list[int], seq_lens: list[int]) -> tuple[Any, Any]:
    return np.array(query_lens), np.array(seq_lens)


def chosen(choice: AttentionChoice, query_lens: list[int], seq_lens: list[int]) -> str:
    """The name of who computes a step."""
    backend: Any = choice.for_step(*lens(query_lens, seq_lens))
    return "triton" if backend is None else str(backend.args[0])


def choose(
    directory: Path, clock: Clock, *, needs: AttentionNeeds = NEEDS, device_name: str = "H200"
) -> AttentionChoice:
    adapters = found_right([FlashInferAttention, FlashAttention], needs, CPU)
    return measured_choice(
        adapters, needs, BOUNDS, CPU, device_name=device_name, directory=directory / "attention", time=clock
    )


def one_is_fast(name: str, kind: str) -> float:
    """FlashInfer wins prompts, FlashAttention mixtures, and no one decodes."""
    return 1.0 if (name, kind) in {("flashinfer", "prompt"), ("flash_attn", "mixed")} else 3.0


def test_the_shape_of_a_step_is_its_kind_its_tokens_and_their_keys() -> None:
    assert shape_of(*lens([1, 1], [10, 30])) == StepShape("decode", 2, 20)
    assert shape_of(*lens([30, 10], [30, 110])) == StepShape("prompt", 40, 50)
    assert shape_of(*lens([3, 1], [4, 40])) == StepShape("mixed", 4, 13)
    assert shape_of(*lens([1], [1])) == StepShape("decode", 1, 1)


def test_the_nearest_measured_shape_of_the_same_kind_decides() -> None:
    table = AttentionTable(
        {
            StepShape("decode", 1, 1000): {"triton": 1.0, "a": 2.0, "b": 3.0},
            StepShape("decode", 64, 1000): {"triton": 3.0, "a": 2.0, "b": 1.0},
            StepShape("prompt", 64, 1000): {"triton": 3.0, "a": 1.0, "b": 2.0},
        }
    )
    names = ("a", "b")
    assert table.fastest(StepShape("decode", 7, 1000), names) == "triton"
    assert table.fastest(StepShape("decode", 9, 1000), names) == "b", "64 is 7 times 9, which is 9 times 1"
    assert table.fastest(StepShape("decode", 9, 1000), ["a"]) == "a", "b is not there any more"
    assert table.fastest(StepShape("prompt", 1, 1), names) == "a"
    assert table.fastest(StepShape("mixed", 64, 1000), names) == "triton", "no one has measured it"


def test_the_faster_one_computes_each_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice = choose(tmp_path, Clock(one_is_fast))
    assert chosen(choice, [1, 1], [50, 60]) == "triton"
    assert chosen(choice, [40], [60]) == "flashinfer"
    assert chosen(choice, [40, 1], [60, 90]) == "flash_attn"
    (said,) = [record.getMessage() for record in caplog.records if record.name == attention_choice.__name__]
    assert said.startswith("attention, of 5 shapes of steps: triton for 2, flashinfer for 2, flash_attn for 1 ")
    assert "(measured in " in said


def test_who_is_never_the_fastest_is_let_go(tmp_path: Path) -> None:
    assert choose(tmp_path, Clock(lambda name, kind: 1.0 if name == "flash_attn" else 9.0)).names == ["flash_attn"]
    assert choose(tmp_path, Clock(lambda name, kind: 9.0), device_name="B").names == []


def test_a_second_start_does_not_measure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    choose(tmp_path, Clock(one_is_fast))
    clock = Clock(one_is_fast)
    with caplog.at_level(logging.INFO):
        choice = choose(tmp_path, clock)
    assert clock.num_calls == 0
    assert "(measured before)" in caplog.text
    assert chosen(choice, [40], [60]) == "flashinfer"
    (path,) = (tmp_path / "attention").iterdir()
    assert json.loads(path.read_text())["key"]["device"] == "H200", "a reader can tell what it is of"


def test_another_device_package_or_model_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(tmp_path, Clock(one_is_fast))
    for other in (
        {"device_name": "H100"},
        {"needs": replace(NEEDS, num_heads=8)},
        {"needs": replace(NEEDS, block_size=32)},
        {"needs": replace(NEEDS, dtype=torch.float16, cache_dtype=torch.float16)},
        {"needs": replace(NEEDS, layers=NEEDS.layers[:2])},
    ):
        clock = Clock(one_is_fast)
        choose(tmp_path, clock, **other)  # type: ignore[arg-type]  # options of one name each
        assert clock.num_calls, other
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.2")
    clock = Clock(one_is_fast)
    choose(tmp_path, clock)
    assert clock.num_calls


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"key": 1', '{"key": null, "rows": []}'])
def test_a_spoiled_table_is_measured_anew(text: str, tmp_path: Path) -> None:
    choose(tmp_path, Clock(one_is_fast))
    (path,) = (tmp_path / "attention").iterdir()
    path.write_text(text)
    clock = Clock(one_is_fast)
    choose(tmp_path, clock)
    assert clock.num_calls
    assert json.loads(path.read_text())["rows"]


def test_a_table_with_other_rows_than_it_should_have_is_none(tmp_path: Path) -> None:
    table, key = AttentionTable({StepShape("decode", 1, 2): {"triton": 1.0}}), {"a": 1}
    path = table.save(tmp_path, key)
    assert load_table(tmp_path, key) == table
    path.write_text(json.dumps({"key": key, "rows": [{"kind": "decode"}]}))
    assert load_table(tmp_path, key) is None


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "attention").write_text("a file")
    assert chosen(choose(tmp_path, Clock(one_is_fast)), [40], [60]) == "flashinfer"
    assert "the table of attention is not kept, the next start measures again" in caplog.text


def test_without_a_folder_every_start_measures() -> None:
    adapters = found_right([FlashInferAttention], NEEDS, CPU)
    clock = Clock(one_is_fast)
    for _ in range(2):
        choice = measured_choice(adapters, NEEDS, BOUNDS, CPU, device_name="H200", directory=None, time=clock)
        assert choice.names == ["flashinfer"]
    assert clock.num_calls == 2 * 2 * 5


class Cuda:
    """What a choice asks of torch about a GPU that is not there."""

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return (9, 0)

    def get_device_name(self, device: torch.device) -> str:
        return "H200"

    def empty_cache(self) -> None:
        pass


@pytest.mark.parametrize(
    ("asked", "options", "has_kernel", "checked", "is_measured"),
    [
        ("auto", {}, True, ["flashinfer", "flash_attn"], True),
        ("flash_attn", {}, True, ["flash_attn"], False),
        ("triton", {}, True, None, False),
        ("auto", {"head_dim": 320}, True, None, False),
        ("auto", {}, False, None, False),
    ],
)
def test_on_a_gpu_the_flag_says_who_is_checked_and_whether_anybody_is_measured(
    asked: AttentionBackend,
    options: dict[str, int],
    has_kernel: bool,
    checked: list[str] | None,
    is_measured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def find(candidates: list[type[Adapter]], needs: AttentionNeeds, device: torch.device) -> dict[str, Adapter]:
        seen["checked"], seen["needs"] = [candidate.name for candidate in candidates], needs
        return {candidates[0].name: candidates[0](needs=needs, device=CPU)}

    def go_by_table(adapters: dict[str, Adapter], *_: Any, **where: Any) -> AttentionChoice:
        seen["measured"] = where
        return AttentionChoice(adapters)

    torch_there = SimpleNamespace(cuda=Cuda(), empty=lambda *_, **__: None)
    monkeypatch.setattr(attention_choice, "torch", torch_there)
    monkeypatch.setattr(attention_choice, "triton_kernel", lambda name, probe: object() if has_kernel else None)
    monkeypatch.setattr(attention_choice, "found_right", find)
    monkeypatch.setattr(attention_choice, "measured_choice", go_by_table)
    config = EngineConfig(model=ModelConfig(attention_backend=asked), cache=CacheConfig(block_size=32))
    layers = attention_layers(replace(SPEC, **options))
    choice = choose_attention(config, layers, dtype=torch.bfloat16, max_model_len=100, device=torch.device("cuda"))
    assert seen.get("checked") == checked
    assert choice.names == ([] if checked is None else checked[:1])
    assert ("measured" in seen) == is_measured
    if checked is not None:
        assert seen["needs"] == AttentionNeeds(
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            block_size=32,
            dtype=torch.bfloat16,
            cache_dtype=torch.bfloat16,
            layers=(Scoring(0.25, 7), Scoring(0.25)),
            capability=(9, 0),
        )
    if is_measured:
        assert seen["measured"]["device_name"] == "H200"
        assert seen["measured"]["directory"].parts[-2:] == ("pagoda", "attention")


class Broken(FlashAttention):
    """Says what it can do, and cannot."""

    name = "broken"

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image\nand much more")


class Narrow(FlashAttention):
    """Sees one key less than it should, where there is a window."""

    name = "narrow"

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        window = options.pop("window")
        return super().__call__(*args, **options, window=None if window is None else window - 1)


class Nan(FlashAttention):
    """Forgets to write a row."""

    name = "nan"

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        output = super().__call__(*args, **options).clone()
        output[-1] = torch.nan
        return output


class Confused(FlashAttention):
    """Sums keys instead of values."""

    name = "confused"

    def __call__(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        return super().__call__(query, k_cache, k_cache, *args, **options)


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (Confused, "confused does not compute attention, our kernels do: its results are "),
        (Broken, "broken does not compute attention, our kernels do: RuntimeError: no kernel image"),
        (Narrow, "narrow does not compute attention, our kernels do: its results are "),
        (Nan, "nan does not compute attention, our kernels do: its results are inf tolerances from ours"),
    ],
)
def test_who_raises_or_differs_is_out_with_one_line(
    candidate: type[Adapter], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert list(found_right([candidate, FlashInferAttention], NEEDS, CPU)) == ["flashinfer"]
    (record,) = caplog.records
    assert record.getMessage().startswith(reason)
    assert "\n" not in record.getMessage()


def test_a_package_that_cannot_be_imported_is_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert list(found_right([FlashInferAttention], NEEDS, CPU)) == []
    assert "ModuleNotFoundError" in caplog.text


def test_heads_that_a_package_cannot_serve_stay_with_our_kernels(caplog: pytest.LogCaptureFixture) -> None:
    adapters = found_right([FlashInferAttention, FlashAttention], replace(NEEDS, head_dim=80), CPU)
    assert list(adapters) == ["flash_attn"]
    (record,) = caplog.records
    assert record.getMessage() == (
        "flashinfer does not compute attention, our kernels do: head_dim is 80, must be one of 64, 128, 256"
    )


def test_what_fails_while_it_is_measured_leaves_everything_to_our_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(run: Callable[[], object]) -> float:
        raise RuntimeError("out of resources")

    adapters = found_right([FlashInferAttention, FlashAttention], NEEDS, CPU)
    choice = measured_choice(adapters, NEEDS, BOUNDS, CPU, device_name="H200", directory=tmp_path, time=failing)
    assert choice.names == []
    assert "measuring failed: RuntimeError: out of resources" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 70, 256])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 100, 2048])
@pytest.mark.parametrize("max_model_len", [1, 2, 300, 40960])
def test_measured_steps_are_within_what_can_come(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> None:
    bounds = StepBounds(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len
    )
    steps = steps_to_measure(bounds)
    assert 1 <= len(steps) <= 24
    shapes = {shape_of(*lens(list(step.query_lens), list(step.seq_lens))) for step in steps}
    assert len(shapes) == len(steps)
    for step in steps:
        assert 1 <= len(step.query_lens) <= max_num_seqs
        assert sum(step.query_lens) <= max_num_batched_tokens
        assert all(1 <= q <= k <= max_model_len for q, k in zip(*step, strict=True))
    if min(max_num_seqs, max_num_batched_tokens, max_model_len) > 2:
        assert {shape.kind for shape in shapes} == {"decode", "prompt", "mixed"}


def test_the_checked_batch_has_all_kinds_of_sequences() -> None:
    step = Lens(*CHECKED)
    assert shape_of(*lens(list(step.query_lens), list(step.seq_lens))).kind == "mixed"


def test_layers_are_asked_for_as_the_model_computes_them() -> None:
    assert scorings(attention_layers(SPEC)) == (Scoring(0.25, 7), Scoring(0.25))
    capped = replace(SPEC, windows=(), scales=(0.5, 0.1), attention_softcap=50.0)
    assert scorings(attention_layers(capped)) == (Scoring(0.5, None, 50.0), Scoring(0.1, None, 50.0))


def test_a_plan_of_a_recorded_step_is_left_to_our_kernels() -> None:
    assert AttentionPlan(np.ones(1), np.ones(1), np.zeros((1, 0)), 16, torch.float32, CPU).backend is None


def test_a_cpu_refuses_all_but_auto() -> None:
    check_attention_backend("auto", CPU)
    for asked in ("triton", "flashinfer", "flash_attn"):
        with pytest.raises(ConfigError, match=f"attention_backend is '{asked}', must be auto on a CPU") as caught:
            check_attention_backend(asked, CPU)
        assert caught.value.field == "attention_backend"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_that_finds_no_gpu_refuses_it_too() -> None:
    with pytest.raises(ConfigError, match="attention_backend is 'triton', must be auto on a CPU"):
        Worker().init_device(EngineConfig(model=ModelConfig(attention_backend="triton")))


def test_what_was_asked_for_reaches_the_worker() -> None:
    config = engine_config_from_options(attention_backend="FLASH_ATTN")
    assert engine_config_from_proto(worker_config_to_proto(config)).model.attention_backend == "flash_attn"


def test_what_is_not_installed_is_refused_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for asked in ("auto", "triton", "flashinfer", "flash_attn"):
        check_attention_backend(asked, device)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    message = (
        "attention_backend is 'flash_attn', must be one of auto, triton, flashinfer: "
        "no package flash_attn_3 is installed"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        check_attention_backend("flash_attn", device)
    assert caught.value.field == "attention_backend"


def test_a_table_is_of_all_that_decides_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    adapters = {"flashinfer": cast("Adapter", SimpleNamespace(version=lambda: "0.6.1"))}
    assert table_key(adapters, NEEDS, BOUNDS, "a device") == {
        "device": "a device",
        "torch": "2.0",
        "cuda": "13.0",
        "packages": {"flashinfer": "0.6.1"},
        "heads": [4, 2, 64],
        "block_size": 16,
        "dtype": ["torch.bfloat16", "torch.bfloat16"],
        "layers": [[0.125, None, None], [0.125, 4096, None], [0.125, None, None]],
        "bounds": [4, 64, 100],
    }
