"""Measures what a forward pass takes besides weights and KV cache, on an accelerator."""

import numpy as np
import torch

from pagoda_common.config import EngineConfig
from pagoda_common.sampling_params import SamplingParams
from pagoda_worker.batch import ExecuteModelInput, NewRequest
from pagoda_worker.kv_cache import KVCache
from pagoda_worker.model_runner import ModelRunner
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.tensor_parallel import ALONE, TensorParallel


def peak_activation_bytes(
    model: Decoder,
    *,
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel = ALONE,
) -> int:
    """Bytes that the largest step takes: max_num_batched_tokens as one long prompt, or as max_num_seqs short ones that
    are all sampled with filters. All ranks of a group measure together."""
    num_tokens, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    longest = max(1, min(max_model_len - 1, num_tokens))
    num_sampled = num_seqs * (1 + config.speculative.num_speculative_tokens)
    many = min(num_sampled, num_tokens)
    shapes = ((1, longest), (many, max(1, min(longest, num_tokens // many))))
    return max(
        _measure(model, count, length, config.cache.block_size, max_model_len, dtype, device, parallel)
        for count, length in shapes
    )


def _measure(
    model: Decoder,
    count: int,
    length: int,
    block_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel,
) -> int:
    blocks_each = -(-length // block_size)
    kv_cache = KVCache(
        spec=model.spec,
        num_blocks=blocks_each * count,
        num_cpu_blocks=0,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    runner = ModelRunner(
        model=model,
        kv_cache=kv_cache,
        max_num_seqs=count,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        parallel=parallel,
    )
    requests = [
        NewRequest(
            slot=slot,
            request_id=f"profile-{slot}",
            prompt_token_ids=np.zeros(length, dtype=np.int64),
            sampling_params=SamplingParams(temperature=1.0, top_p=0.9, seed=0),
            block_ids=np.arange(blocks_each) + slot * blocks_each,
        )
        for slot in range(count)
    ]
    step = ExecuteModelInput(
        new_requests=requests, num_seqs=count, slots=np.arange(count), num_scheduled_tokens=np.full(count, length)
    )
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.execute(step)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before
