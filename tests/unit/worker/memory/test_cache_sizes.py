"""How much room a cache has, with made-up models: blocks, recurrent states, and what the worker tells of itself."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import OutOfMemory
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.memory import available_blocks as module
from pagoda_worker.memory.available_blocks import AvailableBlocks, available_blocks
from pagoda_worker.memory.state_pool import state_bytes
from pagoda_worker.metrics import WorkerCollector
from pagoda_worker.models.cache_groups import CacheGroup, make_layout, plain_layout
from pagoda_worker.models.model import AttentionLayer, RecurrentLayer, StateTensor

BLOCK = 4 * 8 * 2 * 4
"""Bytes of a block of a layer with one head: 4 tokens, 8 numbers, keys and values, float32."""
STATE = 10 * 4


def loaded_of(
    *,
    memory: int | None,
    has_attention: bool = True,
    has_states: bool = False,
    host: int = 0,
    num_drafts: int = 0,
    max_num_seqs: int = 2,
    fits: bool = False,
) -> LoadedModel:
    layers = [AttentionLayer(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)] if has_attention else []
    recurrent = [RecurrentLayer(tensors=(StateTensor((4,)), StateTensor((2, 3))))] if has_states else []
    model = SimpleNamespace(only_pools=False, attention_layers=layers, recurrent_layers=recurrent)
    config = EngineConfig(
        model=ModelConfig(max_model_len=-1 if fits else 20),
        cache=CacheConfig(block_size=4, kv_cache_memory_bytes=memory, cpu_kv_cache_memory_bytes=host),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        speculative=SpeculativeConfig(num_speculative_tokens=num_drafts),
    )
    return LoadedModel(
        model=cast("Any", model),
        config=config,
        max_model_len=20,
        weight_bytes=0,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        device=torch.device("cpu"),
        layout=plain_layout(len(layers)),
    )


def test_the_numbers_are_those_of_the_docs() -> None:
    assert (module.MAX_CPU_CACHE_BYTES, module.CPU_CACHE_SHARE) == (4 << 30, 0.4)
    assert (module.SNAPSHOT_SHARE, module.SNAPSHOTS_A_SEQUENCE, module.MIN_SNAPSHOTS) == (0.25, 16, 2)


def test_blocks_are_those_that_fit_and_no_more_than_all_sequences_fill() -> None:
    assert available_blocks(loaded_of(memory=9 * BLOCK + 1)) == AvailableBlocks(9, 0, BLOCK)
    assert available_blocks(loaded_of(memory=99 * BLOCK)).num_blocks == 10
    assert available_blocks(loaded_of(memory=99 * BLOCK, max_num_seqs=3)).num_blocks == 15
    assert available_blocks(loaded_of(memory=9 * BLOCK, host=3 * BLOCK + 5)).num_cpu_blocks == 3


def test_one_sequence_must_fit_unless_the_context_is_to() -> None:
    assert available_blocks(loaded_of(memory=5 * BLOCK)).num_blocks == 5
    with pytest.raises(OutOfMemory, match="room for 16 tokens") as caught:
        available_blocks(loaded_of(memory=5 * BLOCK - 1))
    assert "one request of max_model_len 20 needs" in caught.value.message
    assert "raise --kv-cache-memory, or lower --max-model-len (auto takes what fits)" in caught.value.message
    assert available_blocks(loaded_of(memory=BLOCK, fits=True)).num_blocks == 1
    with pytest.raises(OutOfMemory, match="room for 0 tokens"):
        available_blocks(loaded_of(memory=BLOCK - 1, fits=True))


@pytest.mark.parametrize(("available", "num_bytes"), [(10_000, 4000), (1 << 40, 4 << 30)])
def test_on_a_cpu_the_cache_has_a_share_of_the_memory(
    available: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_memory_bytes", lambda: available)
    assert module._free_bytes(loaded_of(memory=None)) == num_bytes


def test_a_model_that_only_pools_has_no_cache() -> None:
    loaded = loaded_of(memory=1)
    cast("Any", loaded.model).only_pools = True
    assert available_blocks(loaded) == AvailableBlocks(0, 0, 0)


def test_states_are_those_of_slots_of_drafts_and_a_quarter_of_the_rest() -> None:
    assert state_bytes(loaded_of(memory=1, has_states=True).model.recurrent_layers, torch.float32) == STATE
    slots = 2 * STATE
    found = available_blocks(loaded_of(memory=slots + 4 * 3 * STATE + 3 * 4 * BLOCK, has_states=True))
    # A quarter of what the slots leave, then blocks have what is left.
    share = (4 * 3 * STATE + 3 * 4 * BLOCK) // 4
    num_snapshots = min(share // STATE, 32)
    assert (found.num_state_snapshots, found.state_bytes) == (num_snapshots, STATE)
    assert found.num_blocks == min((4 * 3 * STATE + 12 * BLOCK - num_snapshots * STATE) // BLOCK, 10)


def test_recurrent_layers_alone_have_snapshots_up_to_a_bound() -> None:
    found = available_blocks(loaded_of(memory=1 << 20, has_states=True, has_attention=False))
    assert found == AvailableBlocks(0, 0, 0, num_state_snapshots=32, state_bytes=STATE)
    found = available_blocks(loaded_of(memory=1 << 20, has_states=True, has_attention=False, max_num_seqs=1))
    assert found.num_state_snapshots == 16


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_two_snapshots_must_fit(num_drafts: int) -> None:
    rows = 2 * (1 + num_drafts) * STATE
    options: dict[str, Any] = {"has_states": True, "has_attention": False, "num_drafts": num_drafts}
    assert available_blocks(loaded_of(memory=rows + 8 * STATE, **options)).num_state_snapshots == 2
    assert available_blocks(loaded_of(memory=rows + 12 * STATE, **options)).num_state_snapshots == 3
    with pytest.raises(OutOfMemory, match=f"{2 * (1 + num_drafts)} recurrent states and 2 snapshots"):
        available_blocks(loaded_of(memory=rows + 8 * STATE - 4, **options))


def test_a_quarter_of_host_memory_is_for_snapshots() -> None:
    host = 8 * STATE + 3 * BLOCK
    found = available_blocks(loaded_of(memory=1 << 20, has_states=True, host=host))
    num_snapshots = host // 4 // STATE
    assert (found.num_cpu_state_snapshots, found.num_cpu_blocks) == (
        num_snapshots,
        (host - num_snapshots * STATE) // BLOCK,
    )


@pytest.mark.parametrize(("facts", "model"), [(None, ""), (SimpleNamespace(model="m"), "m")])
def test_a_worker_tells_its_state_and_its_blocks(facts: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    registry = CollectorRegistry()
    worker = SimpleNamespace(facts=facts, state="serving", num_blocks=12)
    registry.register(WorkerCollector(worker=cast("Any", worker)))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    assert found == {("pagoda:worker_info", "serving", model): 1, ("pagoda:worker_kv_blocks",): 12}


def test_an_accelerator_s_memory_is_told_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (11, 22))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 33)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 44)
    registry = CollectorRegistry()
    registry.register(WorkerCollector(worker=cast("Any", SimpleNamespace(facts=None, state="device", num_blocks=0))))
    found = {
        sample.labels["kind"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if "kind" in sample.labels
    }
    assert found == {"free": 11, "total": 22, "allocated": 33, "reserved": 44}


def test_an_accelerator_has_what_the_largest_step_leaves_and_another_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = SimpleNamespace(kv_cache_bytes=5 * BLOCK)
    monkeypatch.setattr(module, "measured_budget", lambda loaded: budget)
    loaded = replace(loaded_of(memory=None), device=torch.device("cuda"))
    assert available_blocks(loaded).num_blocks == 5
    budget.kv_cache_bytes -= 1
    with pytest.raises(OutOfMemory, match="raise --kv-cache-memory or --gpu-memory-utilization, or lower"):
        available_blocks(loaded)


def test_a_sequence_has_blocks_of_every_group() -> None:
    layer = AttentionLayer(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
    groups = (CacheGroup("full", (0,)), CacheGroup("window", (1,), 4))
    loaded = loaded_of(memory=99 * BLOCK)
    cast("Any", loaded.model).attention_layers = [layer, layer]
    scheduler = replace(loaded.config.scheduler, max_num_batched_tokens=4)
    layout = make_layout(groups, max_model_len=20, knows_groups=True)
    loaded = replace(loaded, config=replace(loaded.config, scheduler=scheduler), layout=layout)
    assert len(layout.groups) == 2
    # 20 tokens in blocks of 4, and of the window 4 tokens, those of a step and a block that both lie in.
    assert available_blocks(loaded).num_blocks == 2 * (5 + 3)
    small = replace(loaded.config, cache=replace(loaded.config.cache, kv_cache_memory_bytes=7 * BLOCK + 5))
    with pytest.raises(OutOfMemory, match=r"has room for 14 tokens"):
        available_blocks(replace(loaded, config=small))
