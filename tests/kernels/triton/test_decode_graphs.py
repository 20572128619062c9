"""Padded decode steps on Triton kernels: the same logits and tokens, and no one's cache is touched."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.quantized_cache import scales_of
from pagoda_kernels.external.flash_attn import FlashAttention
from pagoda_kernels.selection import use_references
from pagoda_worker.attention.choice import AttentionChoice
from pagoda_worker.graphs.cuda_graphs import make_decode_graphs, why_eager
from pagoda_worker.graphs.decode_graphs import DecodeGraphs, Graph
from pagoda_worker.steps.input_batch import ForwardInputs
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.steps.step import NewRequest, StepInput
from pagoda_worker.worker import Worker
from tests.fakes.flash_attn_module import flash_attn_module
from tests.kernels.attention.test_external_attention import NEEDS
from tests.kernels.triton.test_model import CONFIG
from tests.unit.worker.driver import Driver, Tracked
from tests.unit.worker.steps.step_scripts import ints, run_ahead, run_one_by_one, told

PROMPTS = [list(range(5, 6)), list(range(20, 57)), list(range(100, 117))]
PARAMS = [
    SamplingParams(temperature=0.0, seed=1, logprobs=3),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, top_k=40),
    SamplingParams(temperature=0.7, seed=3, presence_penalty=0.5, repetition_penalty=1.2, prompt_logprobs=1),
]


class Called(NamedTuple):
    """A graph that computes again what it should have recorded."""

    run: Callable[[], None]
    replays: list[str]

    def replay(self) -> None:
        self.replays.append("replayed")
        self.run()


class CallingRecorder:
    """Makes such graphs; `replays` has an entry for each time that one ran."""

    def __init__(self) -> None:
        self.replays: list[str] = []

    def record(self, run: Callable[[], None]) -> Graph:
        run()
        return Called(run, self.replays)


def make_driver(directory: Path, *, engine: Mapping[str, Any] = MappingProxyType({}), **options: object) -> Driver:
    """Of a model with one layer unless `options` say otherwise: an interpreted layer takes long."""
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1} | options))
    driver = Driver(directory, load_format="dummy", max_num_seqs=8, num_blocks=40, **engine)
    use_references(())
    return driver


def numbers_of(cache: torch.Tensor) -> torch.Tensor:
    """What may be NaN in a cache: all, or the scales of int8."""
    return scales_of(cache) if cache.dtype == torch.int8 else cache


def add_graphs(
    driver: Driver, *, max_num_seqs: int = 8, overlaps: bool = False, attention: AttentionChoice | None = None
) -> tuple[DecodeGraphs, CallingRecorder]:
    """A new runner in the driver's worker, whose cache holds NaN wherever nothing was written."""
    loaded, recorder = driver.worker._loaded_model(), CallingRecorder()
    scheduler = dataclasses.replace(loaded.config.scheduler, max_num_seqs=max_num_seqs)
    loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, scheduler=scheduler))
    assert why_eager(loaded) is None
    cache = loaded.make_cache(num_blocks=40)
    graphs = make_decode_graphs(loaded, cache, recorder)
    for one in (*cache.k_caches, *cache.v_caches):
        numbers_of(one).fill_(torch.nan)
    graphs.record_all()
    assert all(bool(numbers_of(one).isnan().all()) for one in (*cache.k_caches, *cache.v_caches)), (
        "recording writes nothing"
    )
    driver.worker._runner = ModelRunner(
        model=loaded.model,
        kv_cache=cache,
        max_num_seqs=max_num_seqs,
        max_model_len=loaded.max_model_len,
        dtype=loaded.dtype,
        device=loaded.device,
        decode_graphs=graphs,
        overlaps=overlaps,
        attention=attention,
    )
    return graphs, recorder


def assert_alike(actual: list[Tracked], expected: list[Tracked]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.output == other.output
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


LATENTS: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_routed_experts": None,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 12,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
}


@pytest.mark.parametrize(
    ("engine", "options"),
    [({}, {}), ({"quantization": "int4-g32", "kv_cache_dtype": "int8"}, {}), ({}, LATENTS)],
    ids=["floats", "small", "latents"],
)
def test_tokens_are_those_of_steps_that_are_not_padded(
    engine: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    driver = make_driver(tmp_path, engine=engine, **options)
    expected = driver.generate(PROMPTS, PARAMS, max_tokens=4, chunk=20)
    driver = make_driver(tmp_path, engine=engine, **options)
    _, recorder = add_graphs(driver, max_num_seqs=4)
    actual = driver.generate(PROMPTS, PARAMS, max_tokens=4, chunk=20)
    assert_alike(actual, expected)
    # The second prompt has two chunks: its first token comes with the others' second, and its last one comes alone.
    assert len(recorder.replays) == 3


class Counting(FlashAttention):
    """Knows the sequences of each step that it computed."""

    def __init__(self) -> None:
        super().__init__(needs=NEEDS, device=torch.device("cpu"))
        self.plans: list[AttentionPlan] = []

    def __call__(self, query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not self.plans or args[2] is not self.plans[-1]:
            self.plans.append(args[2])
        return super().__call__(query, *args, **options)


def test_other_packages_compute_the_steps_that_no_graph_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_module())
    driver = make_driver(tmp_path, head_dim=24)
    expected = driver.generate(PROMPTS, PARAMS, max_tokens=4, chunk=20)
    driver, adapter = make_driver(tmp_path, head_dim=24), Counting()
    _, recorder = add_graphs(driver, max_num_seqs=4, attention=AttentionChoice({"flash_attn": adapter}))
    actual = driver.generate(PROMPTS, PARAMS, max_tokens=4, chunk=20)
    assert_alike(actual, expected)
    assert len(recorder.replays) == 3, "as without another package"
    assert [plan.query_lens.tolist() for plan in adapter.plans] == [[1, 20, 17], [1, 17, 1]]


def test_a_step_that_runs_ahead_replays_with_the_tokens_that_the_device_has(tmp_path: Path) -> None:
    greedy, seeded = SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=2, top_p=0.9, top_k=40)
    requests = [
        NewRequest(
            slot=slot,
            request_id=str(slot),
            prompt_token_ids=ints([20 + slot] * (1 + 7 * slot)),
            sampling_params=(greedy, seeded)[slot % 2],
            block_ids=ints([3 * slot, 3 * slot + 1]),
        )
        for slot in range(3)
    ]
    first = StepInput(new_requests=requests, num_seqs=3, slots=ints([0, 1, 2]), num_scheduled_tokens=ints([1, 8, 15]))
    fewer = StepInput(freed_slots=ints([0]), num_seqs=2, slots=ints([2, 1]))
    joined = StepInput(
        new_requests=[dataclasses.replace(requests[0], block_ids=ints([20]))], num_seqs=3, slots=ints([1, 0, 2])
    )
    steps = [first, *[StepInput(num_seqs=3)] * 2, fewer, StepInput(num_seqs=2), joined]
    driver = make_driver(tmp_path)
    add_graphs(driver)
    assert isinstance(driver.worker, Worker)
    expected = [told(output) for output in run_one_by_one(driver.worker, steps)]
    _, recorder = add_graphs(driver, overlaps=True)
    outputs, num_ahead = run_ahead(driver.worker, steps)
    assert [told(output) for output in outputs] == expected
    assert (num_ahead, len(recorder.replays)) == (5, 5)


def test_padding_changes_no_logits_and_no_cache(tmp_path: Path) -> None:
    driver = make_driver(tmp_path, num_hidden_layers=2)
    graphs, _ = add_graphs(driver)
    runner = driver.worker._runner
    assert runner is not None
    cache = runner._kv_cache
    generator = torch.Generator().manual_seed(3)
    table = np.array([[3, 9, 0], [30, 1, 2]], dtype=np.int32)
    owned = torch.tensor([3, 9, 30, 1, 2])
    for one in (*cache.k_caches, *cache.v_caches):
        one[owned] = torch.randn(one[owned].shape, generator=generator)
    before = [one.clone() for one in (*cache.k_caches, *cache.v_caches)]
    positions = np.array([19, 40])
    inputs = ForwardInputs(
        batch_rows=np.arange(2),
        slots=np.arange(2),
        num_scheduled_tokens=np.ones(2, dtype=np.int64),
        num_draft_tokens=np.zeros(2, dtype=np.int64),
        seq_lens=positions + 1,
        block_tables=table[None],
        input_ids=np.array([17, 250]),
        positions=positions,
        slot_mappings=(table[[0, 1], positions // 16].astype(np.int64) * 16 + positions % 16)[None],
        is_sampled=np.ones(2, dtype=np.bool_),
    )
    logits = {}
    with torch.inference_mode():
        for size in graphs.sizes[1:]:
            graphs.load(inputs, size)
            logits[size] = graphs.replay(size, 2).clone()
    assert sorted(logits) == [2, 4, 8]
    assert all(torch.isfinite(padded).all() for padded in logits.values())
    for padded in logits.values():
        torch.testing.assert_close(padded, logits[2], atol=1e-6, rtol=1e-5)
    for now, then in zip((*cache.k_caches, *cache.v_caches), before, strict=True):
        is_changed = ~torch.isclose(now, then, equal_nan=True, atol=0, rtol=0).flatten(2).all(dim=2)
        assert is_changed.nonzero().tolist() == [[2, 40 % 16], [9, 19 % 16]], "the slots of the two tokens"


def test_a_model_without_a_kernel_is_not_recorded(tmp_path: Path) -> None:
    loaded = make_driver(tmp_path).worker._loaded_model()
    use_references(["rope_store"])
    assert why_eager(loaded) == "rope_store runs as plain PyTorch"
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1}
    loaded = make_driver(tmp_path, **experts).worker._loaded_model()
    assert why_eager(loaded) is None
    loaded = make_driver(tmp_path, **experts).worker._loaded_model()
    use_references(["grouped_linear"])
    assert why_eager(loaded) == "the host has to hear which tokens an expert gets"
