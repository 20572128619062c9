"""Blocks that a step moves: out to the host first, then in, then copies; each block whole."""

import numpy as np
import pytest
import torch

from pagoda_common.errors import PagodaError
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.steps.step import StepInput
from pagoda_worker.worker import Worker
from tests.unit.worker.driver import Driver

NUM_BLOCKS, NUM_CPU_BLOCKS = 8, 4


def worker_and_cache() -> tuple[Worker, KVCache]:
    """Every block of the device holds its number, keys and values apart."""
    worker = Worker(num_threads=1)
    Driver("pagoda-tiny", worker=worker, num_blocks=NUM_BLOCKS)
    assert worker._runner is not None
    cache = worker._runner._kv_cache
    for layer, (keys, values) in enumerate(zip(cache.k_caches, cache.v_caches, strict=True)):
        for block in range(NUM_BLOCKS):
            keys[block] = 100 * layer + block
            values[block] = -(100 * layer + block)
    return worker, cache


def contents(cache: KVCache) -> list[int]:
    """Whose number each block of the device holds, in all layers, keys and values."""
    found = []
    for block in range(NUM_BLOCKS):
        numbers = [keys[block].unique() - 100 * layer for layer, keys in enumerate(cache.k_caches)]
        numbers += [-values[block].unique() - 100 * layer for layer, values in enumerate(cache.v_caches)]
        (number,) = torch.cat(numbers).unique().tolist()
        found.append(int(number))
    return found


def pairs(*moves: tuple[int, int]) -> np.ndarray:
    return np.array(moves, dtype=np.int64).reshape(-1, 2)


def test_a_block_is_swapped_out_before_another_one_comes_into_its_place() -> None:
    worker, cache = worker_and_cache()
    worker.execute_model(StepInput(blocks_to_swap_out=pairs((2, 3))))
    worker.execute_model(StepInput(blocks_to_swap_out=pairs((5, 0)), blocks_to_swap_in=pairs((3, 5))))
    assert contents(cache) == [0, 1, 2, 3, 4, 2, 6, 7], "5 holds what was 2"
    worker.execute_model(StepInput(blocks_to_swap_in=pairs((0, 1))))
    assert contents(cache) == [0, 5, 2, 3, 4, 2, 6, 7], "the host has what 5 held before"


def test_a_block_that_leaves_and_comes_back_in_one_step_is_what_it_was() -> None:
    worker, cache = worker_and_cache()
    worker.execute_model(StepInput(blocks_to_swap_out=pairs((6, 1)), blocks_to_swap_in=pairs((1, 0))))
    assert contents(cache) == [6, 1, 2, 3, 4, 5, 6, 7]


def test_copies_come_after_what_is_swapped_in() -> None:
    worker, cache = worker_and_cache()
    worker.execute_model(StepInput(blocks_to_swap_out=pairs((7, 2), (1, 0))))
    worker.execute_model(StepInput(blocks_to_swap_in=pairs((2, 4), (0, 3)), blocks_to_copy=pairs((4, 5), (3, 6))))
    assert contents(cache) == [0, 1, 2, 1, 7, 7, 1, 7]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (StepInput(blocks_to_swap_out=pairs((NUM_BLOCKS, 0))), "block 8 is not below 8"),
        (StepInput(blocks_to_swap_out=pairs((0, NUM_CPU_BLOCKS))), "block 4 is not below 4"),
        (StepInput(blocks_to_swap_in=pairs((NUM_CPU_BLOCKS, 0))), "block 4 is not below 4"),
        (StepInput(blocks_to_swap_in=pairs((0, NUM_BLOCKS))), "block 8 is not below 8"),
    ],
)
def test_blocks_that_do_not_exist_are_not_moved(step: StepInput, message: str) -> None:
    worker, cache = worker_and_cache()
    with pytest.raises(PagodaError, match=message):
        worker.execute_model(step)
    assert contents(cache) == list(range(NUM_BLOCKS))
    with pytest.raises(PagodaError, match="call InitializeCache"):
        worker.execute_model(StepInput())
