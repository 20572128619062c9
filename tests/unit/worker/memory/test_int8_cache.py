"""The worker with an int8 KV cache: its memory, and what the embedded model answers."""

from typing import get_args

import numpy as np
import pytest
import torch

from pagoda_common.config.engine_config import EMBEDDED_MODEL, CacheConfig, EngineConfig, KVCacheDType, ModelConfig
from pagoda_common.errors import ConfigError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.attention.quantized_cache import FP8, cache_width, dequantize_rows, quantize_rows, to_fp8
from pagoda_scheduler.rpc.convert import worker_config_to_proto
from pagoda_worker.memory.kv_cache import KVCache, block_bytes
from pagoda_worker.models.model import AttentionLayer
from pagoda_worker.rpc.convert import engine_config_from_proto
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import make_prompts

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def drivers() -> tuple[Driver, Driver]:
    """The embedded model over a cache of floats, and of int8."""
    return Driver(EMBEDDED_MODEL), Driver(EMBEDDED_MODEL, kv_cache_dtype="int8")


def layers_of(driver: Driver) -> tuple[AttentionLayer, ...]:
    model = driver.worker._model
    assert model is not None
    return model.attention_layers


def test_blocks_are_smaller_and_counted_with_their_scales(drivers: tuple[Driver, Driver]) -> None:
    layers = layers_of(drivers[1])
    layer = layers[0]
    num_bytes = block_bytes(layers, block_size=16, dtype=torch.int8)
    assert num_bytes == 2 * len(layers) * 16 * layer.num_kv_heads * (layer.head_dim + 4)
    assert num_bytes < 0.6 * block_bytes(layers, block_size=16, dtype=torch.bfloat16)
    cache = KVCache(
        layers=layers, num_blocks=3, num_cpu_blocks=1, block_size=16, dtype=torch.int8, device=torch.device("cpu")
    )
    assert cache.num_bytes == 3 * num_bytes


def test_blocks_move_with_their_scales_and_lose_their_nans(drivers: tuple[Driver, Driver]) -> None:
    layers = layers_of(drivers[1])
    layer = layers[0]
    cache = KVCache(
        layers=layers, num_blocks=4, num_cpu_blocks=2, block_size=16, dtype=torch.int8, device=torch.device("cpu")
    )
    stored = quantize_rows(torch.randn(16, layer.num_kv_heads, layer.head_dim))
    cache.k_caches[0][1] = stored
    cache.swap_out(np.array([[1, 0]]))
    cache.swap_in(np.array([[0, 3]]))
    cache.copy(np.array([[3, 2]]))
    assert torch.equal(cache.k_caches[0][2], stored)
    bad = torch.randn(16, layer.num_kv_heads, layer.head_dim)
    bad[0, 0, 0], bad[1, 0, 0] = torch.nan, torch.inf
    cache.v_caches[0][2] = quantize_rows(bad)
    cache.sanitize(np.array([2]))
    restored = dequantize_rows(cache.v_caches[0][2], layer.head_dim, torch.float32)
    assert restored.isfinite().all()
    assert (restored[:2, 0] == 0).all()
    assert torch.equal(cache.v_caches[0][2][2:], quantize_rows(bad)[2:])
    assert cache.k_caches[0].shape[-1] == cache_width(layer.head_dim, torch.int8)


def test_blocks_of_8_bit_floats_lose_their_nans_of_either_sign_and_nothing_else() -> None:
    layer = AttentionLayer(num_heads=1, num_kv_heads=1, head_dim=256, scale=1.0)
    cache = KVCache(layers=[layer], num_blocks=2, num_cpu_blocks=0, block_size=1, dtype=FP8, device=torch.device("cpu"))
    codes = torch.arange(256, dtype=torch.uint8)
    for blocks in (cache.k_caches[0], cache.v_caches[0]):
        blocks.view(torch.uint8)[:] = codes
    cache.sanitize(np.array([1]))
    for blocks in (cache.k_caches[0], cache.v_caches[0]):
        kept, cleaned = blocks.view(torch.uint8).view(2, 256)
        assert torch.equal(kept, codes)
        assert torch.equal(cleaned, torch.where((codes == 0x7F) | (codes == 0xFF), 0, codes))


def test_the_embedded_model_answers_as_with_floats(drivers: tuple[Driver, Driver]) -> None:
    """Log probabilities of the float cache's answers are within 0.08, 0.02 in the mean; most tokens are the same."""
    exact, rounded = drivers
    prompts = make_prompts((5, 16, 40, 200))
    answers = [sequence.output for sequence in exact.generate(prompts, max_tokens=NUM_TOKENS)]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    described = [driver.generate(texts, params, max_tokens=1) for driver in drivers]
    for one, other, prompt in zip(*described, prompts, strict=True):
        logprobs = [np.concatenate([part.logprobs.logprobs for part in side.prompt_logprobs]) for side in (one, other)]
        error = np.abs(logprobs[0] - logprobs[1])[len(prompt) - 1 :]
        assert 0 < error.mean() < 0.02
        assert error.max() < 0.08
    own = [sequence.output for sequence in rounded.generate(prompts, max_tokens=NUM_TOKENS)]
    agreeing = sum(a == b for mine, theirs in zip(own, answers, strict=True) for a, b in zip(mine, theirs, strict=True))
    assert agreeing >= 0.7 * NUM_TOKENS * len(prompts)


def test_chunks_and_neighbours_change_nothing(drivers: tuple[Driver, Driver]) -> None:
    prompts = make_prompts((17, 200, 33))
    together = [sequence.output for sequence in drivers[1].generate(prompts, chunk=50)]
    assert together == [drivers[1].generate([prompt])[0].output for prompt in prompts]


def test_the_data_type_crosses_the_wire() -> None:
    for value in get_args(KVCacheDType):
        config = EngineConfig(cache=CacheConfig(kv_cache_dtype=value))
        assert engine_config_from_proto(worker_config_to_proto(config)).cache.kv_cache_dtype == value


@pytest.mark.parametrize("value", ["fp8_e5m2", "bfloat16"])
def test_other_data_types_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype is '{value}', must be one of auto, int8, fp8"):
        CacheConfig(kv_cache_dtype=value)


def test_fp8_is_refused_on_a_cpu_with_what_it_has() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8', must be auto or int8 on a CPU"):
        EngineConfig(model=ModelConfig(device="cpu"), cache=CacheConfig(kv_cache_dtype="fp8"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8', must be auto or int8 on a CPU"):
            Driver(EMBEDDED_MODEL, kv_cache_dtype="fp8")


def test_blocks_of_fp8_move_and_lose_their_nans(drivers: tuple[Driver, Driver]) -> None:
    layers = layers_of(drivers[1])
    layer = layers[0]
    cache = KVCache(layers=layers, num_blocks=3, num_cpu_blocks=2, block_size=16, dtype=FP8, device=torch.device("cpu"))
    assert cache.num_bytes == 3 * block_bytes(layers, block_size=16, dtype=torch.bfloat16) // 2
    stored = to_fp8(torch.randn(16, layer.num_kv_heads, layer.head_dim))
    cache.k_caches[0][1] = stored
    cache.swap_out(np.array([[1, 0]]))
    cache.swap_in(np.array([[0, 2]]))
    cache.copy(np.array([[2, 0]]))
    assert torch.equal(cache.k_caches[0][0].float(), stored.float())
    cache.k_caches[0][2, 0, 0, 0] = torch.nan
    cache.sanitize(np.array([2]))
    assert cache.k_caches[0][2, 0, 0, 0] == 0
    assert torch.equal(cache.k_caches[0][2, 1:].float(), stored[1:].float())
