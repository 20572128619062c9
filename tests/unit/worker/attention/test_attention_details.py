"""Which layers stay with Pagoda's kernels on a GPU, what is measured for the others, and what a failing step does."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_kernels.external.adapter import Adapter, AttentionNeeds, Scoring
from pagoda_worker.attention import choice as module
from pagoda_worker.attention.choice import AttentionChoice, choose_attention
from pagoda_worker.attention.measurement import (
    KEYS,
    TOLERANCE,
    Batch,
    Lens,
    StepBounds,
    difference,
    measure,
    steps_to_measure,
)
from pagoda_worker.attention.table import AttentionTable, StepShape
from pagoda_worker.models.model import AttentionLayer
from tests.unit.worker.attention.attention_packages import NEEDS

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
LAYER = AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)


class Machine:
    """A GPU that is not there; notes what is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.needs: AttentionNeeds | None = None
        self.bounds: StepBounds | None = None
        self.num_emptied = 0
        cuda = SimpleNamespace(
            get_device_capability=lambda device: (9, 0),
            get_device_name=lambda device: "H200",
            empty_cache=self._empty,
        )
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, empty=lambda *_, **__: None))
        monkeypatch.setattr(module, "triton_kernel", lambda name, probe: object())
        monkeypatch.setattr(module, "installed_adapters", list)
        monkeypatch.setattr(module, "found_right", self._find)
        monkeypatch.setattr(module, "measured_choice", self._measure)

    def _empty(self) -> None:
        self.num_emptied += 1

    def _find(self, candidates: Any, needs: AttentionNeeds, device: torch.device) -> dict[str, Adapter]:
        self.needs = needs
        return {}

    def _measure(self, adapters: Any, needs: Any, bounds: StepBounds, device: Any, **_: Any) -> AttentionChoice:
        self.bounds = bounds
        return AttentionChoice()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def config_of(backend: Any = "auto", **cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(attention_backend=backend),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=900),
    )


def choose(layers: list[AttentionLayer], config: EngineConfig | None = None, **more: Any) -> AttentionChoice:
    given = {"dtype": torch.bfloat16, "max_model_len": 500, "device": CUDA, **more}
    return choose_attention(config or config_of(), layers, **given)


@pytest.mark.parametrize("backend", ["auto", "triton", "flash_attn"])
@pytest.mark.parametrize(
    ("layers", "more", "message"),
    [
        ([LAYER], {"has_windows": True}, "may read blocks that left a window: attention is computed by triton"),
        ([LAYER, replace(LAYER, chunk=499)], {}, "does not compute attention in chunks, triton does"),
        ([LAYER, replace(LAYER, latent_rank=8)], {}, "does not compute attention over latents, triton does"),
    ],
)
def test_layers_of_some_kinds_are_computed_by_our_kernels(
    layers: list[AttentionLayer],
    more: dict[str, Any],
    message: str,
    backend: str,
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert choose(layers, config_of(backend), **more).names == []
    assert machine.needs is None, "no one is checked"
    said = [record.getMessage() for record in caplog.records]
    assert said == ([f"flash_attn {message}"] if backend == "flash_attn" else [])


@pytest.mark.parametrize(
    ("layers", "is_checked"),
    [
        ([LAYER, replace(LAYER, chunk=500)], True),
        ([LAYER, replace(LAYER, scale=0.5)], True),
        ([LAYER, replace(LAYER, num_heads=8)], False),
        ([LAYER, replace(LAYER, num_kv_heads=4)], False),
        ([LAYER, replace(LAYER, head_dim=32)], False),
        ([], False),
    ],
)
def test_layers_of_one_shape_are_checked(layers: list[AttentionLayer], is_checked: bool, machine: Machine) -> None:
    choose(layers)
    assert (machine.needs is not None) is is_checked
    assert machine.num_emptied == int(is_checked), "memory of made-up steps is given back"


def test_a_cpu_checks_no_one(machine: Machine) -> None:
    choose([LAYER], device=CPU)
    assert machine.needs is None


def test_what_is_asked_of_packages_is_what_the_model_and_its_cache_are(machine: Machine) -> None:
    layers = [replace(LAYER, window=7), replace(LAYER, softcap=30.0, has_biases=True)]
    choose(layers, config_of(block_size=32, kv_cache_dtype="fp8"))
    assert machine.needs == AttentionNeeds(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=32,
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
        layers=(Scoring(0.25, 7, None), Scoring(0.25, None, 30.0)),
        has_biases=True,
        capability=(9, 0),
    )
    assert machine.bounds == StepBounds(max_num_seqs=7, max_num_batched_tokens=900, max_model_len=500)


# Steps.


class Failing:
    """An adapter that raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        raise self.error


def test_memory_that_does_not_last_is_an_error_and_any_other_fault_is_ours_to_mend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def ours(query: str, k_cache: str, v_cache: str, plan: Any, **scoring: Any) -> str:
        asked.append((query, k_cache, v_cache, plan, scoring, plan.backend))
        return "ours"

    monkeypatch.setattr(module, "paged_attention", ours)
    scoring = {"scale": 0.5, "window": 3, "softcap": 9.0}
    for error in (torch.OutOfMemoryError("no room"), RuntimeError("odd")):
        adapter = Failing(error)
        choice = AttentionChoice({"flash_attn": cast("Adapter", adapter)})
        attend: Any = choice.for_step(np.array([1]), np.array([5]))
        plan = SimpleNamespace(backend=attend)
        if isinstance(error, torch.OutOfMemoryError):
            with pytest.raises(torch.OutOfMemoryError):
                attend("q", "k", "v", plan, **scoring)
            assert (choice.names, asked) == (["flash_attn"], [])
            continue
        assert attend("q", "k", "v", plan, **scoring) == "ours"
        assert attend("q", "k", "v", plan, **scoring) == "ours"
        assert asked == [("q", "k", "v", plan, scoring, None)] * 2
        assert choice.names == []
        assert choice.for_step(np.array([1]), np.array([5])) is None


def test_an_adapter_is_given_what_a_step_has() -> None:
    given: list[Any] = []

    def adapter(*args: Any, **scoring: Any) -> str:
        given.append((args, scoring))
        return "theirs"

    choice = AttentionChoice({"flash_attn": cast("Adapter", adapter)})
    attend: Any = choice.for_step(np.array([1]), np.array([5]))
    assert attend("q", "k", "v", "plan", scale=0.5, window=3, softcap=9.0) == "theirs"
    assert given == [(("q", "k", "v", "plan"), {"scale": 0.5, "window": 3, "softcap": 9.0})]
    assert choice.for_step(np.array([], dtype=np.int64), np.array([], dtype=np.int64)) is None


def test_a_table_decides_by_the_shape_of_the_step() -> None:
    rows = {StepShape("decode", 1, 5): {"triton": 2.0, "a": 1.0}, StepShape("decode", 1, 500): {"triton": 1.0, "a": 2}}
    choice = AttentionChoice({"a": cast("Adapter", print)}, AttentionTable(rows))
    assert choice.for_step(np.array([1]), np.array([500])) is None
    assert choice.for_step(np.array([1]), np.array([5])) is not None


# Measurements.


def test_tolerances_and_timed_keys_are_as_they_were_decided() -> None:
    assert {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5} == TOLERANCE
    assert KEYS == (256, 2048, 16384)


def told(bounds: StepBounds) -> list[str]:
    """Each step: how many tokens of prompts, how many decodes, and the keys of the first and the last sequence."""
    steps = []
    for query_lens, seq_lens in steps_to_measure(bounds):
        num_decodes = sum(length == 1 for length in query_lens)
        steps.append(f"{sum(query_lens) - num_decodes}+{num_decodes} of {seq_lens[0]}, {seq_lens[-1]}")
    return steps


def test_the_steps_of_a_large_engine() -> None:
    bounds = StepBounds(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=40960)
    assert told(bounds) == [
        *(f"0+{batch} of {keys}, {keys}" for batch in (1, 8, 64) for keys in (256, 2048, 16384)),
        *(f"0+256 of {keys}, {keys}" for keys in (256, 2048)),
        *(f"{chunk}+0 of {keys}, {keys}" for chunk in (128, 512, 8192) for keys in (chunk, chunk + 2048)),
        *(f"{chunk}+32 of {max(chunk, 2048)}, 2048" for chunk in (512, 8192 - 32)),
    ]


def test_the_steps_of_a_small_engine() -> None:
    bounds = StepBounds(max_num_seqs=5, max_num_batched_tokens=200, max_model_len=1000)
    assert told(bounds) == [
        *(f"0+{batch} of {keys}, {keys}" for batch in (1, 5) for keys in (256, 1000)),
        *(f"{chunk}+0 of {keys}, {keys}" for chunk in (128, 200) for keys in (chunk, 1000)),
        "196+4 of 1000, 1000",
    ]


SMALL = replace(NEEDS, head_dim=8, dtype=torch.float32, cache_dtype=torch.float32, layers=(Scoring(0.5),))


def test_a_batch_has_blocks_of_its_own_while_there_is_room() -> None:
    block_bytes = 16 * 2 * 8 * 4
    roomy = Batch(Lens([1, 3], [40, 20]), SMALL, CPU)
    assert roomy.query.shape == (4, 4, 8)
    assert roomy.k_cache.shape == roomy.v_cache.shape == (6, 16, 2, 8), "3 and 2 blocks, and one of no sequence"
    table = roomy._block_table
    assert table.shape == (2, 3)
    assert sorted(table[0].tolist() + table[1, :2].tolist()) == [1, 2, 3, 4, 5]
    assert table[1, 2] == 0
    assert bool(roomy.k_cache[0].isnan().all())
    assert bool(roomy.v_cache[0].isnan().all())
    assert not bool(roomy.k_cache[1:].isnan().any())
    assert not torch.equal(roomy.k_cache[1:], roomy.v_cache[1:])
    narrow = Batch(Lens([1, 3], [40, 20]), SMALL, CPU, pool_bytes=2 * block_bytes)
    assert narrow.k_cache.shape[0] == 3
    assert set(narrow._block_table[0].tolist()) == {1, 2}
    assert Batch(Lens([1], [40]), SMALL, CPU, pool_bytes=1).k_cache.shape[0] == 2


class Shapeless:
    """Gives rows of another size."""

    def __init__(self, *, needs: AttentionNeeds, device: torch.device) -> None:
        self.needs = needs

    def __call__(self, query: Tensor, *_: Any, **__: Any) -> Tensor:
        return query.flatten(1)[:, :1]


class OffBy:
    """Gives ours, and a little more."""

    part = 0.0

    def __init__(self, *, needs: AttentionNeeds, device: torch.device) -> None:
        self.needs = needs

    def __call__(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, **scoring: Any) -> Tensor:
        plan.backend = None
        ours = module.paged_attention(query, k_cache, v_cache, plan, **scoring)
        plan.backend = self
        return ours + self.part * (1 + ours.abs())


@pytest.mark.parametrize("part", [0.5, -2.0])
def test_a_difference_is_told_in_tolerances(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference(cast("Any", Shapeless), SMALL, CPU) == float("inf")
    monkeypatch.setattr(OffBy, "part", part * 1e-5)
    assert difference(cast("Any", OffBy), SMALL, CPU) == pytest.approx(abs(part), rel=0.05)


def test_every_package_and_ours_are_timed_in_every_step() -> None:
    bounds = StepBounds(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=8)
    timed: list[Any] = []

    def time(run: Any) -> float:
        timed.append(run.args[0])
        return float(len(timed))

    adapters = {"a": cast("Adapter", print)}
    table = measure(adapters, SMALL, bounds, CPU, time=time, pool_bytes=1 << 20)
    assert list(table.rows) == [
        StepShape("decode", 1, 8),
        StepShape("decode", 2, 8),
        StepShape("prompt", 8, 8),
        StepShape("mixed", 8, 8),
    ]
    assert timed == [None, print] * 4
    assert [dict(row) for row in table.rows.values()] == [{"triton": 2 * n + 1.0, "a": 2 * n + 2.0} for n in range(4)]
