"""Every Triton kernel against its reference, once: on a GPU, in the interpreter, or only through the compiler."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.adapters import adapter_checks
from benchmarks.gpu.backends import backend_checks
from benchmarks.gpu.latents import latent_checks
from benchmarks.gpu.mixtures import mixture_checks
from benchmarks.gpu.quantized import quantized_checks
from benchmarks.gpu.small_cache import small_cache_checks
from benchmarks.gpu.tools.attention_case import BLOCK_SIZE, attention_case
from benchmarks.gpu.tools.check import TOLERANCE, Check, Pair
from pagoda_kernels.attention.copy_blocks import copy_blocks, copy_blocks_reference
from pagoda_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagoda_kernels.attention.rope_store import HeadNorms, rope_store, rope_store_reference
from pagoda_kernels.attention.store_kv_cache import store_kv_cache, store_kv_cache_reference
from pagoda_kernels.layers.act_and_mul import ACTIVATIONS, act_and_mul, act_and_mul_reference
from pagoda_kernels.layers.add_rms_norm import add_rms_norm, add_rms_norm_reference
from pagoda_kernels.layers.rms_norm import rms_norm, rms_norm_reference
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_kernels.recurrent.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from pagoda_kernels.recurrent.state_space_scan import state_space_scan, state_space_scan_reference
from pagoda_kernels.sampling.apply_penalties import apply_token_penalties, apply_token_penalties_reference
from pagoda_kernels.sampling.apply_token_bitmask import apply_token_bitmask, apply_token_bitmask_reference
from pagoda_kernels.sampling.sample_tokens import sample_tokens, sample_tokens_reference
from pagoda_kernels.sampling.top_logprobs import top_logprobs, top_logprobs_reference
from pagoda_kernels.selection import triton_kernel, use_references


def checks(device: torch.device, *, is_small: bool) -> Iterator[Check]:
    """All of them. `is_small`: shapes for an interpreter."""
    sizes = (1, 17) if is_small else (1, 15, 16, 17, 300, 1000)
    # Compiling is what costs: every head size and group, but not all of them together.
    heads = [(torch.bfloat16, 128, 4), (torch.float32, 80, 4)]
    if not is_small:
        heads += [(torch.bfloat16, head_dim, 4) for head_dim in (64, 80, 96, 256)]
        heads += [(torch.bfloat16, 128, group) for group in (1, 7, 8)]
        heads += [(torch.float32, 64, 4), (torch.float32, 128, 8), (torch.float16, 128, 4)]
    for dtype, head_dim, group in heads:
        yield from _attention(device, dtype, head_dim, group, is_small)
        yield from backend_checks(device, dtype, head_dim, group)
        yield from _cache_writes(device, dtype, head_dim)
        if group == 4:
            yield from small_cache_checks(device, dtype, head_dim, is_small=is_small)
    for dtype in (torch.float32, torch.bfloat16) if is_small else tuple(TOLERANCE):
        for num_tokens in sizes:
            yield from _rows(device, dtype, num_tokens, 128 if is_small else 4096)
    for vocab_size in (300,) if is_small else (300, 32000, 151936):
        yield from _logits(device, vocab_size, 3 if is_small else 33)
    yield from quantized_checks(device, is_small=is_small)
    yield from mixture_checks(device, is_small=is_small)
    yield from latent_checks(device, is_small=is_small)
    yield from adapter_checks(device, is_small=is_small)
    yield Check("gated_delta_rule", "chunks and decodes", lambda: _delta_rule(device, 20 if is_small else 128))
    yield Check("state_space_scan", "chunks and decodes", lambda: _scan(device, 20 if is_small else 128))
    yield Check("copy_blocks", "within one tensor", lambda: _copies(device))


def is_chosen(operation: str, device: torch.device) -> bool:
    """Whether a Triton kernel computes this operation there."""
    return triton_kernel(operation, torch.empty(0, device=device)) is not None


def _attention(device: torch.device, dtype: torch.dtype, head_dim: int, group: int, is_small: bool) -> Iterator[Check]:
    lens = ([1, 20], [40, 33]) if is_small else ([1, 1, 17, 64, 1, 16], [3000, 17, 300, 64, 1, 1000])
    slopes = torch.rand(2 * group, device=device)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window": 20},
        "softcap": {"softcap": 0.5, "window": 50},
        "biases": {"alibi_slopes": slopes},
        "sinks": {"sinks": slopes - 0.5},
    }
    for name, option in options.items():

        def run(option: dict[str, Any] = option) -> list[Pair]:
            case = attention_case(*lens, 2 * group, 2, head_dim, dtype, device)
            actual = paged_attention(*case, scale=head_dim**-0.5, **option)
            expected = paged_attention_reference(*case, scale=head_dim**-0.5, **option)
            return [Pair(actual, expected, TOLERANCE[dtype])]

        yield Check("paged_attention", f"{name} {dtype} head_dim {head_dim} group {group}", run)


def _recurrent_batch(device: torch.device) -> RecurrentBatch:
    query_lens = np.array([1, 9, 1, 30])
    kept = np.full(int(query_lens.sum()), -1)
    kept[2] = 5
    return RecurrentBatch(query_lens=query_lens, rows=np.array([3, 0, 2, 1]), device=device, kept_rows=kept)


def _delta_rule(device: torch.device, dim: int) -> list[Pair]:
    batch = _recurrent_batch(device)
    num_tokens = int(batch.query_lens.sum())
    query, key = torch.randn(2, num_tokens, 2, dim, device=device)
    value, states = torch.randn(num_tokens, 4, dim, device=device), torch.randn(6, 4, dim, dim, device=device)
    beta, decay = torch.rand(num_tokens, 4, device=device), -torch.rand(num_tokens, 4, device=device)
    expected_states = states.clone()
    actual = gated_delta_rule(query, key, value, decay, beta, states, batch)
    expected = gated_delta_rule_reference(query, key, value, decay, beta, expected_states, batch)
    return [Pair(actual, expected, 1e-4), Pair(states, expected_states, 1e-4)]


def _scan(device: torch.device, state_size: int) -> list[Pair]:
    batch = _recurrent_batch(device)
    num_tokens, head_dim = int(batch.query_lens.sum()), state_size // 2
    x = torch.randn(num_tokens, 4, head_dim, device=device)
    states = torch.randn(6, 4, state_size, head_dim, device=device)
    b, c = torch.randn(2, num_tokens, 2, state_size, device=device)
    step, expected_states = torch.randn(num_tokens, 4, device=device), states.clone()
    bias, decay, skip = torch.randn(3, 4, device=device)
    heads = {"step_bias": bias, "decay_log": decay, "skip": skip}
    actual = state_space_scan(x, b, c, step, states, batch, **heads)
    expected = state_space_scan_reference(x, b, c, step, expected_states, batch, **heads)
    return [Pair(actual, expected, 1e-4), Pair(states, expected_states, 1e-4)]


def _cache_writes(device: torch.device, dtype: torch.dtype, head_dim: int) -> Iterator[Check]:
    def inputs() -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
        qkv = torch.randn(17, 8 * head_dim, device=device, dtype=dtype)
        caches = [torch.full((3, BLOCK_SIZE, 2, head_dim), torch.nan, device=device, dtype=dtype) for _ in range(4)]
        slots = torch.randperm(40)[:17]
        slots[::5] = -1
        return qkv, caches[:2], caches[2:], slots.to(device)

    def store() -> list[Pair]:
        qkv, actual, expected, slots = inputs()
        heads = qkv.view(17, 8, head_dim)
        store_kv_cache(heads[:, 4:6], heads[:, 6:], *actual, slots)
        store_kv_cache_reference(heads[:, 4:6], heads[:, 6:], *expected, slots)
        return [Pair(one, other, TOLERANCE[dtype]) for one, other in zip(actual, expected, strict=True)]

    def rotate(norms_are_last: bool) -> list[Pair]:
        qkv, actual, expected, slots = inputs()
        angles = torch.randn(17, 1, head_dim // 2, device=device)
        weights = torch.randn(2, head_dim, device=device, dtype=dtype)
        norms, rotary = HeadNorms(weights[0], weights[1], 1e-6, 0.0, norms_are_last), (angles.cos(), angles.sin())
        query = rope_store(qkv, *actual, slots, rotary=rotary, norms=norms)
        turned = rope_store_reference(qkv, *expected, slots, rotary=rotary, norms=norms)
        pairs = zip((query, *actual), (turned, *expected), strict=True)
        return [Pair(one, other, TOLERANCE[dtype]) for one, other in pairs]

    yield Check("store_kv_cache", f"{dtype} head_dim {head_dim}", store)
    yield Check("rope_store", f"{dtype} head_dim {head_dim}", lambda: rotate(False))
    yield Check("rope_store", f"{dtype} head_dim {head_dim}, norms after the rotation", lambda: rotate(True))


def _rows(device: torch.device, dtype: torch.dtype, num_tokens: int, dim: int) -> Iterator[Check]:
    def norm() -> list[Pair]:
        x, weight = torch.randn(num_tokens, dim, device=device, dtype=dtype), torch.randn(dim, device=device)
        weight = weight.to(dtype)
        return [Pair(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), TOLERANCE[dtype])]

    def add() -> list[Pair]:
        x, residual = torch.randn(2, num_tokens, dim, device=device, dtype=dtype)
        weight = torch.randn(dim, device=device, dtype=dtype)
        pairs = zip(
            add_rms_norm(x, residual, weight, 1e-6), add_rms_norm_reference(x, residual, weight, 1e-6), strict=True
        )
        return [Pair(one, other, TOLERANCE[dtype]) for one, other in pairs]

    def gates() -> list[Pair]:
        x = torch.randn(num_tokens, 2 * dim, device=device, dtype=dtype)
        return [
            Pair(act_and_mul(x, name), act_and_mul_reference(x.double(), name).to(dtype), TOLERANCE[dtype])
            for name in ACTIVATIONS
        ]

    for operation, run in (("rms_norm", norm), ("add_rms_norm", add), ("act_and_mul", gates)):
        yield Check(operation, f"{dtype} {num_tokens} x {dim}", run)


def _logits(device: torch.device, vocab_size: int, n: int) -> Iterator[Check]:
    def logits() -> Tensor:
        values = torch.randn(n, vocab_size, device=device) * 3
        values[:, ::7] = values[:, :1]  # ties
        return values

    def penalties() -> list[Pair]:
        counts = torch.randint(0, 3, (n, vocab_size), device=device).float()
        amounts = {name: torch.rand(n, device=device) + 0.5 for name in ("presence", "frequency", "repetition")}
        case = (logits(), counts > 1, counts)
        pair = apply_token_penalties(*case, **amounts), apply_token_penalties_reference(*case, **amounts)
        return [Pair(*pair, 1e-5)]

    def mask() -> list[Pair]:
        bits = torch.randint(0, 256, (n, -(-vocab_size // 8)), dtype=torch.uint8, device=device)
        values = logits()
        return [Pair(apply_token_bitmask(values, bits), apply_token_bitmask_reference(values, bits), 1e-9)]

    def logprobs() -> list[Pair]:
        values, token_ids = (
            torch.randn(n, vocab_size, device=device) * 3,
            torch.zeros(n, dtype=torch.int64, device=device),
        )
        pairs = zip(top_logprobs(values, token_ids, 5), top_logprobs_reference(values, token_ids, 5), strict=True)
        return [Pair(one, other, 1e-5) for one, other in pairs]

    def draws(names: str) -> list[Pair]:
        values, keys = logits(), torch.randint(-(2**63), 2**63 - 1, (n,)).to(device)
        options = {
            "top_k": torch.randint(0, 50, (n,)).to(device),
            "top_p": torch.rand(n).to(device) * 0.99 + 0.01,
            "min_p": torch.rand(n).to(device) * 0.1,
        }
        chosen = {name: options[name] for name in names.split()}
        temperature = torch.rand(n).to(device) + 0.5
        actual = sample_tokens(values, keys, temperature=temperature, **chosen)
        if vocab_size > 1000:  # the reference draws its numbers in Python's integers
            use_references(["sample_tokens"])
            try:
                return [Pair(actual, sample_tokens(values, keys, temperature=temperature, **chosen), 1e-9)]
            finally:
                use_references(())
        return [Pair(actual, sample_tokens_reference(values / temperature[:, None], keys, **chosen), 1e-9)]

    yield Check("apply_token_penalties", f"{n} x {vocab_size}", penalties)
    yield Check("apply_token_bitmask", f"{n} x {vocab_size}", mask)
    yield Check("top_logprobs", f"{n} x {vocab_size}", logprobs)
    for names in ("", "top_k", "top_p", "min_p", "top_k top_p", "top_k top_p min_p"):
        yield Check("sample_tokens", f"{n} x {vocab_size} {names}", partial(draws, names))


def _copies(device: torch.device) -> list[Pair]:
    blocks = torch.randn(9, 16, 8, 64, device=device)
    copied, expected = blocks.clone(), blocks.clone()
    ids = torch.tensor([8, 0, 3]), torch.tensor([1, 6, 2])
    copy_blocks(copied, copied, *ids)
    copy_blocks_reference(expected, expected, *ids)
    return [Pair(copied, expected, 1e-9)]
