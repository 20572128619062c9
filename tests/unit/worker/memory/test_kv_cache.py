"""KVCache: sizes, and which blocks a move changes; StatePool's bounds."""

from typing import Any

import numpy as np
import pytest
import torch

from pagoda_kernels.attention.quantized_cache import FP8, cache_width
from pagoda_worker.memory.kv_cache import KVCache, block_bytes
from pagoda_worker.memory.transfers import Download, Upload, to_device, to_host
from pagoda_worker.models.cache_groups import CacheGroup, make_layout
from pagoda_worker.models.model import AttentionLayer

CPU = torch.device("cpu")
LAYERS = [AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0) for _ in range(3)]
LATENT = AttentionLayer(num_heads=4, num_kv_heads=1, head_dim=24, scale=1.0, latent_rank=16)


def make_cache(dtype: torch.dtype = torch.float32, *, num_blocks: int = 5, num_cpu_blocks: int = 3) -> KVCache:
    cache = KVCache(
        layers=LAYERS,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        block_size=4,
        dtype=dtype,
        device=CPU,
    )
    for number, one in enumerate((*cache.k_caches, *cache.v_caches)):
        for block in range(num_blocks):
            one[block] = 10 * block + number
    return cache


def content(cache: KVCache) -> list[list[float]]:
    """Of each buffer, the number in each of its blocks; -1 where they differ."""
    buffers = (*cache.k_caches, *cache.v_caches)
    return [
        [float(block.flatten()[0]) if (block == block.flatten()[0]).all() else -1.0 for block in one.float()]
        for one in buffers
    ]


def pairs(*given: tuple[int, int]) -> np.ndarray:
    return np.array(given, dtype=np.int64).reshape(-1, 2)


@pytest.mark.parametrize(
    ("dtype", "width", "size"), [(torch.float32, 8, 4), (torch.bfloat16, 8, 2), (FP8, 8, 1), (torch.int8, None, 1)]
)
def test_a_block_is_as_large_as_its_keys_and_values(dtype: torch.dtype, width: int | None, size: int) -> None:
    width = cache_width(8, dtype) if width is None else width
    of_layer = 4 * 2 * 2 * width * size  # tokens, keys and values, heads, width, bytes
    assert block_bytes(LAYERS, block_size=4, dtype=dtype) == 3 * of_layer
    cache = KVCache(layers=LAYERS, num_blocks=5, num_cpu_blocks=0, block_size=4, dtype=dtype, device=CPU)
    assert cache.num_bytes == 5 * 3 * of_layer
    assert [tuple(one.shape) for one in (*cache.k_caches, *cache.v_caches)] == [(5, 4, 2, width)] * 6


def test_latents_have_no_values() -> None:
    assert block_bytes([LATENT], block_size=4, dtype=torch.float32) == 4 * 24 * 4
    cache = KVCache(layers=[LATENT], num_blocks=2, num_cpu_blocks=1, block_size=4, dtype=torch.float32, device=CPU)
    assert (tuple(cache.k_caches[0].shape), tuple(cache.v_caches[0].shape)) == ((2, 4, 1, 24), (2, 4, 1, 0))
    assert cache.num_bytes == 2 * 4 * 24 * 4


def test_moves_change_the_named_blocks_of_every_layer() -> None:
    cache = make_cache()
    cache.copy(pairs((1, 4), (0, 3)))
    assert content(cache) == [[0 + n, 10 + n, 20 + n, 0 + n, 10 + n] for n in range(6)]
    cache.swap_out(pairs((2, 0), (1, 2)))
    cache.clear(np.array([1, 2]))
    assert content(cache) == [[n, 0, 0, n, 10 + n] for n in range(6)]
    cache.swap_in(pairs((0, 4), (2, 0)))
    assert content(cache) == [[10 + n, 0, 0, n, 20 + n] for n in range(6)]
    before = content(cache)
    for move in (cache.copy, cache.swap_out, cache.swap_in):
        move(pairs())
    assert content(cache) == before


@pytest.mark.parametrize(
    ("move", "pair", "message"),
    [
        ("copy", (5, 0), "block 5 is not below 5"),
        ("copy", (0, 5), "block 5 is not below 5"),
        ("swap_out", (5, 0), "block 5 is not below 5"),
        ("swap_out", (0, 3), "block 3 is not below 3"),
        ("swap_in", (3, 0), "block 3 is not below 3"),
        ("swap_in", (0, 5), "block 5 is not below 5"),
    ],
)
def test_a_block_that_is_not_there_is_not_moved(move: str, pair: tuple[int, int], message: str) -> None:
    cache = make_cache()
    before = content(cache)
    with pytest.raises(ValueError, match=message):
        getattr(cache, move)(pairs((0, 0), pair))
    assert content(cache) == before
    highest = {"copy": (4, 4), "swap_out": (4, 2), "swap_in": (2, 4)}[move]
    getattr(cache, move)(pairs(highest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_what_is_not_a_number_becomes_one_in_the_named_blocks_alone(dtype: torch.dtype) -> None:
    cache = (
        make_cache(torch.float32)
        if dtype == torch.float32
        else KVCache(layers=LAYERS, num_blocks=5, num_cpu_blocks=0, block_size=4, dtype=dtype, device=CPU)
    )
    for one in (*cache.k_caches, *cache.v_caches):
        values = one.float()
        values[:] = 2
        values[1, 0, 0, 0] = values[3, 0, 0, 0] = torch.nan
        one.copy_(values.to(dtype))
    cache.sanitize(np.array([1, 2]))
    for one in (*cache.k_caches, *cache.v_caches):
        values = one.float()
        assert not values[1].isnan().any()
        assert values[3].isnan().sum() == 1
        assert float(values[1, 0, 0, 0]) == 0
        assert (values[[0, 2, 4]] == 2).all()
        assert (values[1].flatten()[1:] == 2).all()


def test_time_of_a_move_is_at_least_a_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    assert cache.time_swap() >= 1
    clock = iter((1_000, 1_600))
    monkeypatch.setattr("pagoda_worker.memory.kv_cache.time.perf_counter_ns", lambda: next(clock))
    assert cache.time_swap() == 100  # three blocks there and back
    clock = iter((1_000, 1_000))
    assert cache.time_swap() == 1


def test_words_go_up_and_down_as_they_are() -> None:
    upload = Upload(num_words=4, device=CPU)
    upload.begin()[:] = [1, 2, 3, 4]
    assert upload.send(3).tolist() == [1, 2, 3]
    assert (upload.num_bytes, upload.begin().tolist()) == (0, [1, 2, 3, 4])
    download = Download(num_words=4, device=CPU)
    words = torch.tensor([5, 6, 7])
    download.send(words)
    words[:] = 0
    assert (download.is_there, download.wait().tolist()) == (True, [5, 6, 7])
    first = download.wait()
    download.send(torch.tensor([8]))
    assert (first.tolist(), download.wait().tolist()) == ([5, 6, 7], [8])
    assert to_device(np.array([1, 2]), CPU).tolist() == [1, 2]
    assert [array.tolist() for array in to_host(torch.tensor([1]), torch.tensor([2.5]))] == [[1], [2.5]]


def test_time_of_a_move_is_measured_on_eight_blocks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, moved = make_cache(num_blocks=20, num_cpu_blocks=12), list[int]()
    for name in ("swap_out", "swap_in"):
        monkeypatch.setattr(cache, name, lambda pairs: moved.append(len(set(map(tuple, pairs.tolist())))))
    clock = iter((1_000, 2_600))
    monkeypatch.setattr("pagoda_worker.memory.kv_cache.time.perf_counter_ns", lambda: next(clock))
    assert (cache.time_swap(), moved) == (100, [8, 8, 8])


def test_layers_of_a_layout_share_buffers() -> None:
    groups = (CacheGroup("full", (0, 2)), CacheGroup("window", (1,), 8))
    layout = make_layout(groups, max_model_len=64, knows_groups=True)
    options: dict[str, Any] = {"block_size": 4, "dtype": torch.float32, "layout": layout}
    cache = KVCache(layers=LAYERS, num_blocks=5, num_cpu_blocks=2, device=CPU, **options)
    num_buffers = len(layout.buffers)
    assert (len(cache.k_caches), len(cache.v_caches), cache.layout) == (num_buffers, num_buffers, layout)
    assert num_buffers < len(LAYERS)
    assert cache.num_bytes == 5 * block_bytes(LAYERS, **options) == 5 * num_buffers * 4 * 2 * 2 * 8 * 4
