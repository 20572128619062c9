"""Attention of other packages over our paged cache: the right arguments, seen in what stand-ins compute from them.

The packages themselves are not installed here, and would need a GPU.
"""

import importlib.machinery
import importlib.metadata
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.external.adapter import Adapter, AttentionNeeds, Scoring
from pagoda_kernels.external.adapters import ADAPTERS, installed_adapters
from pagoda_kernels.external.flash_attn import FlashAttention
from pagoda_kernels.external.flashinfer import FlashInferAttention, _Wrapper, pages_of, workspace_bytes
from tests.fakes.flash_attn_module import flash_attn_module
from tests.fakes.flashinfer_module import flashinfer_module
from tests.kernels.attention.test_paged_attention import make_case

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BATCHES = {
    "one prompt": ([17], [17]),
    "prompts of all lengths": ([1, 15, 16, 17, 65], [1, 15, 16, 17, 65]),
    "chunks": ([5, 16, 33], [65, 300, 49]),
    "decodes": ([1, 1, 1, 1], [1, 16, 17, 300]),
    "all together": ([1, 5, 17, 1, 64, 16, 1], [300, 65, 17, 1, 100, 200, 17]),
}
NEEDS = AttentionNeeds(
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    layers=(Scoring(0.3),),
    capability=(9, 0),
)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are installed, as stand-ins."""
    for module in (flashinfer_module(), flash_attn_module()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.1")


@pytest.fixture(params=list(ADAPTERS))
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return ADAPTERS[request.param](needs=NEEDS, device=CPU)


def check(adapter: Adapter, case: tuple[Any, Any, Any, AttentionPlan], **options: Any) -> None:
    query, k_cache, v_cache, plan = case
    plan.backend = adapter
    actual = paged_attention(query, k_cache, v_cache, plan, scale=0.3, **options)
    expected = paged_attention_reference(query, k_cache, v_cache, plan, scale=0.3, **options)
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_batch_gives_what_the_reference_gives(adapter: Adapter, batch: str, dtype: torch.dtype) -> None:
    check(adapter, make_case(*BATCHES[batch], head_dim=64, dtype=dtype))


@pytest.mark.parametrize("window", [None, 1, 16, 40, 1000])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_windows_and_soft_caps(adapter: Adapter, window: int | None, softcap: float | None) -> None:
    check(adapter, make_case(*BATCHES["all together"], head_dim=64), window=window, softcap=softcap)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (8, 1), (14, 2)])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_head_groups_and_block_sizes(adapter: Adapter, num_heads: int, num_kv_heads: int, block_size: int) -> None:
    case = make_case(
        [1, 40, 1], [33, 41, 64], head_dim=64, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size
    )
    check(adapter, case, window=30)


def test_a_query_may_be_a_part_of_a_wider_tensor_and_caches_of_one(adapter: Adapter) -> None:
    query, k_cache, v_cache, plan = make_case([1, 7], [33, 20], head_dim=64)
    wide = torch.cat((query, query), dim=1)[:, 3:9]
    both = torch.stack((k_cache, v_cache), dim=1)
    check(adapter, (wide, both[:, 0], both[:, 1], plan))


def test_linear_biases_stay_with_our_kernels(adapter: Adapter) -> None:
    check(adapter, make_case([1, 7], [33, 20]), alibi_slopes=torch.rand(6))


def test_a_step_is_planned_once_for_all_layers_that_score_alike_and_another_step_anew() -> None:
    adapter = FlashInferAttention(needs=NEEDS, device=CPU)
    wrapper = sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    query, k_cache, v_cache, plan = make_case([1, 7], [33, 20], head_dim=64)
    other = make_case([3, 1, 1], [3, 18, 200], head_dim=64)
    for _ in range(3):
        check(adapter, (query, k_cache, v_cache, plan))
        check(adapter, (query, k_cache, v_cache, plan), window=9)
    assert wrapper.num_plans == 2
    check(adapter, other, window=9)
    check(adapter, other)
    assert wrapper.num_plans == 4
    # A step with as many tokens, whose blocks are others.
    moved = AttentionPlan(
        plan.query_lens, plan.seq_lens, plan.block_table[::-1].copy(), plan.block_size, plan.dtype, plan.device
    )
    moved.seq_lens = np.array([20, 33])
    moved.query_lens = np.array([1, 7])
    check(adapter, (query, k_cache, v_cache, moved))
    assert wrapper.num_plans == 6


def test_a_plan_that_failed_is_made_again() -> None:
    adapter = FlashInferAttention(needs=NEEDS, device=CPU)
    case = make_case([1, 7], [33, 20], head_dim=64)
    check(adapter, case)
    wrong = AttentionPlan(np.array([1, 7]), np.array([33, 0]), case[3].block_table, 16, torch.float32, CPU)
    with pytest.raises(AssertionError):
        check(adapter, (*case[:3], wrong))
    check(adapter, make_case([2], [20], head_dim=64))


def test_a_plan_waits_until_the_device_has_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def synchronize(self) -> None:
            done.append("wait")

        def record(self, stream: object) -> None:
            done.append("record")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    wrapper = _Wrapper(SimpleNamespace(plan=lambda *_, **__: done.append("plan")), torch.device("cuda"))
    query, k_cache, _, plan = make_case([1, 7], [33, 20], head_dim=64)
    for _ in range(2):
        wrapper.plan(Scoring(0.3), pages_of(plan, CPU), query, k_cache)
    assert done == ["wait", "plan", "record"] * 2


@pytest.mark.parametrize(
    ("adapter_type", "options", "reason"),
    [
        (FlashInferAttention, {}, None),
        (FlashInferAttention, {"head_dim": 80}, "head_dim is 80, must be one of 64, 128, 256"),
        (FlashInferAttention, {"has_biases": True}, "scores have linear biases"),
        (FlashInferAttention, {"dtype": torch.float32}, "the data type is float32, must be bfloat16 or float16"),
        (
            FlashInferAttention,
            {"cache_dtype": torch.int8},
            "the KV cache is of int8, must be of bfloat16 like the queries",
        ),
        (FlashInferAttention, {"capability": (8, 0)}, None),
        (FlashAttention, {}, None),
        (FlashAttention, {"head_dim": 80}, None),
        (FlashAttention, {"head_dim": 20}, "head_dim is 20, must be a multiple of 8 up to 256"),
        (FlashAttention, {"head_dim": 256}, None),
        (FlashAttention, {"head_dim": 264}, "head_dim is 264, must be a multiple of 8 up to 256"),
        (FlashAttention, {"capability": (8, 0)}, "the device has compute capability 8.0, must be 9.0"),
        (FlashAttention, {"capability": (10, 0)}, "the device has compute capability 10.0, must be 9.0"),
        (FlashAttention, {"cache_dtype": torch.float8_e4m3fn}, "the KV cache is of float8_e4m3fn, must be of bfloat16"),
    ],
)
def test_what_a_package_cannot_serve_it_refuses_with_a_reason(
    adapter_type: type[Adapter], options: dict[str, Any], reason: str | None
) -> None:
    refusal = adapter_type.refusal(replace(NEEDS, **options))
    assert (refusal is None) if reason is None else (refusal is not None and refusal.startswith(reason))


@pytest.mark.parametrize(("version", "is_refused"), [("0.2.9", True), ("0.3.0", False), ("1.0rc1", False), ("", True)])
def test_an_old_package_is_refused(version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    refusal = FlashInferAttention.refusal(NEEDS)
    assert (refusal is not None and "must be 0.3 or newer" in refusal) == is_refused


def test_a_package_that_does_not_tell_its_version_is_of_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert FlashAttention.version() == "unknown"
    assert FlashAttention.refusal(NEEDS) is None
    refusal = FlashInferAttention.refusal(NEEDS)
    assert refusal == "flashinfer-python is of version unknown, must be 0.3 or newer"


def test_what_is_not_installed_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [adapter.name for adapter in installed_adapters()] == ["flashinfer", "flash_attn"]
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert [adapter.name for adapter in installed_adapters()] == ["flash_attn"]


def test_the_workspace_holds_the_parts_of_split_keys() -> None:
    assert workspace_bytes(NEEDS, CPU) == 128 << 20, "what is recommended, where that is enough"
    wide = replace(NEEDS, num_heads=1024, num_kv_heads=1, head_dim=256)
    assert workspace_bytes(wide, CPU) > 4 * 1024 * 2 * 128 * 256, "float32 rows of two tiles for every head"
