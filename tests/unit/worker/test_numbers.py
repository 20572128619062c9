"""Bounds and periods of the worker, which nothing else would miss: to change one is a decision, not a slip."""

import importlib

import pytest

from pagoda_scheduler.core.scheduler import MAX_IN_FLIGHT
from pagoda_scheduler.kv.cache_group import NO_BLOCK
from pagoda_scheduler.rpc import heartbeats
from pagoda_worker.rpc import registration
from pagoda_worker.rpc.fence import MAX_STEPS_AHEAD, NUM_KEPT_ANSWERS
from pagoda_worker.steps.step import NULL_BLOCK

NUMBERS = {
    "attention.measurement": {"CHECKED_WINDOW": 20, "POOL_BYTES": 512 << 20, "MAX_STEP_KEYS": 1 << 20, "ROUNDS": 5},
    "graphs.decode_buffers": {"NO_SLOT": -1},
    "graphs.decode_graphs": {"SIZE_STEP": 8, "MAX_GRAPH_SIZE": 512, "PROGRESS_S": 2.0},
    "loader.config_bounds": {"MAX_DEPTH": 32, "MAX_VALUES": 1_000_000, "MAX_EXPERTS": 256 << 10, "MAX_TEXT_CHARS": 200},
    "loader.loaded_model": {"LARGE_MODEL_BYTES": 64 << 20},
    "loader.read_buffers": {"MAX_KEPT_BYTES": 64 << 20, "GRAIN": 64 << 10, "MOST_TIMES_TOO_LARGE": 4},
    "loader.parts": {"PART_BYTES": 16 << 20, "CHUNK_BYTES": 1 << 20},
    "loader.tensor_file": {"MIN_READERS": 2, "MAX_READERS": 16, "MAX_AHEAD_BYTES": 64 << 20, "MAX_AHEAD": 64},
    "loader.weights": {"MAX_NAMED": 8},
    "lora.lora_rows": {"NO_ADAPTER": -1},
    "lora.module_patterns": {
        "MAX_CPU_S": 2.0,
        "MAX_MEMORY_BYTES": 256 << 20,
        "MAX_PATTERNS": 4096,
        "MAX_PATTERN_CHARS": 1024,
    },
    "lora.peft_config": {"MAX_CONFIG_BYTES": 16 << 20, "MAX_NUMBER": 1e9, "MAX_SHOWN_CHARS": 200},
    "lora.peft_files": {"MAX_HEADER_BYTES": 32 << 20},
    "memory.available_blocks": {
        "MAX_CPU_CACHE_BYTES": 4096 << 20,
        "CPU_CACHE_SHARE": 0.4,
        "SNAPSHOT_SHARE": 0.25,
        "SNAPSHOTS_A_SEQUENCE": 16,
        "MIN_SNAPSHOTS": 2,
    },
    "memory.device": {"SMALL_MODEL_BYTES": 2048 << 20},
    "memory.huge_pages": {"PAGE_BYTES": 2 << 20, "MIN_BYTES": 1 << 20},
    "memory.weight_memory": {"SLAB_BYTES": 64 << 20, "ALIGNMENT": 64},
    "memory.memory_ahead": {
        "MAX_SHARE_AHEAD": 0.0625,
        "EARLY_SHARE_AHEAD": 0.5,
        "PERIOD_S": 0.25,
        "PIECE_BYTES": 256 << 10,
    },
    "parallel.handshake": {
        "SECRET_BYTES": 32,
        "NONCE_BYTES": 32,
        "PROOF_BYTES": 32,
        "RANK_BYTES": 4,
        "HELLO_BYTES": 44,
        "HANDSHAKE_TIMEOUT_S": 5.0,
        "MAX_UNPROVED": 64,
    },
    "parallel.peers": {
        "CHUNK_BYTES": 64 << 10,
        "MAX_DIRECT_BYTES": 1 << 20,
        "MAX_TOLD_BYTES": 64 << 10,
        "DIAL_TIMEOUT_S": 5.0,
        "RETRY_S": 0.01,
        "ACCEPT_S": 0.01,
    },
    "parallel.tensor_parallel": {"CONNECT_TIMEOUT_S": 60.0, "OPERATION_TIMEOUT_S": 300.0},
    "rpc.fence": {"MAX_STEPS_AHEAD": 4},
    "rpc.registration": {"HEARTBEAT_PERIOD_S": 1.0, "RETRY_S": 0.1, "MAX_RETRY_S": 0.3, "LEAVE_MARGIN_S": 2.0},
    "rpc.servicer": {"PROGRESS_PERIOD_S": 0.2, "STUCK_AFTER_S": 10.0, "EXIT_STUCK": 70},
    "sampling.drafter": {"FIRST_PAUSE": 8, "MAX_PAUSE": 128},
    "sampling.grammars": {
        "MAX_KEPT": 32,
        "MAX_KEPT_BYTES": 128 << 10,
        "MAX_WAIT_S": 10.0,
        "MAX_HOLD_S": 60.0,
        "NUM_THREADS": 2,
        "NICENESS": 5,
    },
    "sampling.ngram_index": {"FEW_SLOTS": 4, "MAX_STEPPED": 8},
    "sampling.prompt_logprobs": {"MAX_PROMPT_LOGPROB_ROWS": 256},
    "sampling.sampler": {"BAD_TOKEN": -1, "NO_TOKEN": -2},
    "sampling.sampling_columns": {"NO_LOGPROBS": -2, "ANY_TOKEN": -1},
    "sampling.structured": {"NUM_FILL_THREADS": 4},
    "steps.input_batch": {"FIRST_TOKENS": 1024},
    "steps.pipeline": {"POLL_S": 5e-05},
    "steps.step": {"NULL_BLOCK": 4_294_967_295},
    "steps.steps_in_flight": {"MAX_IN_FLIGHT": 2, "NO_GENERATION": -1},
    "threads": {"SINGLE_THREAD_PARAMETERS": 50_000_000, "SPIN_COUNT": 3000, "FEW_ROWS": 4, "HELPED_ROWS": 16},
}


@pytest.mark.parametrize("module", NUMBERS)
def test_numbers_are_as_they_were_decided(module: str) -> None:
    found = importlib.import_module(f"pagoda_worker.{module}")
    assert {name: getattr(found, name) for name in NUMBERS[module]} == NUMBERS[module]


def test_what_both_sides_of_the_wire_know_is_the_same() -> None:
    assert NULL_BLOCK == NO_BLOCK
    assert MAX_STEPS_AHEAD == MAX_IN_FLIGHT
    assert NUM_KEPT_ANSWERS == 8
    assert 3 * registration.HEARTBEAT_PERIOD_S <= heartbeats.IDLE_TIMEOUT_S < heartbeats.TIMEOUT_S
