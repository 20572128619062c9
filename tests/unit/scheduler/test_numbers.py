"""Bounds and periods of the scheduler, which nothing else would miss: to change one is a decision, not a slip."""

import importlib

import pytest

NUMBERS = {
    "adapters.adapter_list": {"MAX_ADAPTERS": 4096},
    "adapters.adapter_pool": {"PATIENCE": 64},
    "core.constraint_holds": {
        "MAX_COMPILING": 2,
        "MAX_AHEAD": 64,
        "MAX_IDLE": 32,
        "MAX_IDLE_BYTES": 128 << 10,
        "LARGE": 1024,
    },
    "core.chunks": {"TARGET_NS": 250_000_000, "MIN_TOKENS": 512, "FASTER_SHARE": 0.2, "SLOWER_SHARE": 0.5},
    "core.in_flight": {"OUTPUT_TOKEN_COST": 2},
    "core.quarantine": {"MAX_CRASHES": 2},
    "core.scheduler": {"MAX_IN_FLIGHT": 4, "MAX_WITHOUT_ADAPTER": 256},
    "core.step_plan": {"MAX_NEW_BYTES": 8 << 20},
    "core.turns": {"TURN": 16, "ADMISSIONS_A_TURN": 64, "CLIENT_TURN": 64, "MAX_CLIENTS": 4096},
    "core.waiting_queue": {"MAX_TENANTS": 4096},
    "engine.engine_core": {"WATCH_PERIOD_S": 0.25, "SHORT_STEP_NS": 4_000_000, "LOAD_RETRY_S": 0.5},
    "engine.readers": {"ANNOUNCE_DELAY_S": 0.01},
    "engine.router": {"MAX_MEMORY": 200_000, "DECODE_COST_TOKENS": 16},
    "engine.watchdog": {"FIRST_STEP_S": 300.0, "PATIENCE": 20.0, "MAX_TICK_S": 0.5},
    "groups.worker_groups": {"REGISTRATION_GRACE_S": 2.0, "LEAVE_POLL_S": 0.02, "RETRY_S": 0.5, "MAX_RETRY_S": 10.0},
    "kv.block_tables": {"HASH_BYTES": 16},
    "kv.cache_group": {"NO_BLOCK": 4_294_967_295},
    "kv.kv_events": {"MAX_BATCHES": 10_000},
    "kv.swap_cost": {"MIN_PREFILL_TOKENS": 64},
    "rpc.convert_requests": {"MAX_BEAM_WIDTH": 256, "UNKNOWN_MODEL_LEN": 2048 << 20, "UNKNOWN_VOCAB_SIZE": 2048 << 20},
    "rpc.heartbeats": {"TIMEOUT_S": 10.0, "IDLE_TIMEOUT_S": 3.0, "TICK_S": 0.25, "MAX_TICK_S": 0.5},
    "rpc.loading_bar": {"STEPS": 10},
    "rpc.joined_steps": {"MAX_JOINED_BYTES": 64 << 10},
    "rpc.outbox": {
        "MAX_UNTAKEN": 1024,
        "MAX_UNTAKEN_BYTES": 32 << 20,
        "MAX_BACKLOG": 20_000,
        "DEFAULT_ACKNOWLEDGES_EVERY": 64,
    },
    "rpc.sinks": {"LOAD_PERIOD_NS": 50_000_000},
    "rpc.worker_client": {"INIT_TIMEOUT_S": 60.0, "CACHE_TIMEOUT_S": 300.0, "LORA_TIMEOUT_S": 600.0},
    "rpc.worker_control": {"INIT_TIMEOUT_S": 60.0, "MOVE_TIMEOUT_S": 600.0},
    "vllm_engine.events": {"HEARTBEAT_S": 1.0, "MAX_BACKLOG": 10_000, "SNAPSHOT_BLOCKS": 256},
    "vllm_engine.servicer": {"CHUNK_BYTES": 1 << 20},
}


@pytest.mark.parametrize("module", NUMBERS)
def test_numbers_are_as_they_were_decided(module: str) -> None:
    found = importlib.import_module(f"pagoda_scheduler.{module}")
    assert {name: getattr(found, name) for name in NUMBERS[module]} == NUMBERS[module]
