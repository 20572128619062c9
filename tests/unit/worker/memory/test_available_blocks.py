"""How many blocks a worker says there is room for: what the memory holds, and no more than sequences could fill."""

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.errors import OutOfMemory
from pagoda_worker.memory.available_blocks import AvailableBlocks
from pagoda_worker.worker import Worker

MAX_MODEL_LEN, BLOCK_SIZE, MAX_NUM_SEQS = 40, 16, 4
PER_REQUEST = 3


def available(num_bytes: int, *, host_bytes: int = 0) -> AvailableBlocks:
    """What a worker with so much memory for its cache has."""
    worker = Worker(num_threads=1)
    worker.init_device(
        EngineConfig(
            model=ModelConfig(device="cpu", max_model_len=MAX_MODEL_LEN),
            cache=CacheConfig(
                block_size=BLOCK_SIZE, kv_cache_memory_bytes=num_bytes, cpu_kv_cache_memory_bytes=host_bytes
            ),
            scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
        )
    )
    worker.load_model(lambda loaded, total: None)
    return worker.determine_num_available_blocks()


@pytest.fixture(scope="module")
def block_bytes() -> int:
    return available(1 << 30).block_bytes


def test_there_are_no_more_than_all_sequences_fill() -> None:
    assert available(1 << 30).num_blocks == MAX_NUM_SEQS * PER_REQUEST


@pytest.mark.parametrize("num_blocks", [PER_REQUEST, MAX_NUM_SEQS * PER_REQUEST - 1])
def test_what_the_memory_holds_whole_counts(num_blocks: int, block_bytes: int) -> None:
    found = available((num_blocks + 1) * block_bytes - 1, host_bytes=3 * block_bytes - 1)
    assert (found.num_blocks, found.num_cpu_blocks) == (num_blocks, 2)


def test_one_request_must_fit_to_the_byte(block_bytes: int) -> None:
    assert available(PER_REQUEST * block_bytes).num_blocks == PER_REQUEST
    with pytest.raises(OutOfMemory, match=r"has room for 32 tokens .* max_model_len 40 needs .*--kv-cache-memory"):
        available(PER_REQUEST * block_bytes - 1)
