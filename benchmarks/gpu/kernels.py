"""What the device can do at best (copies, matrix products), and the kernels at Llama-3.1-8B's shapes beside it."""

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.tools.attention_case import attention_case
from benchmarks.gpu.tools.timing import Figures
from pagoda_kernels.attention.paged_attention import paged_attention
from pagoda_kernels.attention.rope_store import rope_store
from pagoda_kernels.layers.act_and_mul import act_and_mul
from pagoda_kernels.layers.add_rms_norm import add_rms_norm
from pagoda_kernels.sampling.sample_tokens import sample_tokens
from pagoda_kernels.sampling.top_logprobs import top_logprobs

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 32, 8, 128, 4096, 14336, 128256
DTYPE = torch.bfloat16


def decode_shapes(*, is_small: bool) -> tuple[tuple[int, int], ...]:
    """Sequences, and keys of each."""
    return ((2, 40),) if is_small else ((1, 2048), (1, 32768), (64, 1024), (256, 1024))


def prompt_lengths(*, is_small: bool) -> tuple[int, ...]:
    """Tokens of a prompt."""
    return (40,) if is_small else (2048, 8192)


def measure_device(figures: Figures, *, is_small: bool) -> None:
    """Copy bandwidth and the rate of bf16 matrix products."""
    source = torch.zeros(1 << 20 if is_small else 1 << 31, dtype=torch.uint8, device=figures.device)
    target = torch.empty_like(source)
    # In a graph the copy engine would do it, which is slower than kernels are.
    seconds = figures.time(lambda: target.copy_(source), in_graph=False)
    figures.copy_gb_per_s = 2 * source.numel() / seconds / 1e9
    figures.add("device", f"copy of {source.numel() >> 20} MiB", seconds, num_bytes=2 * source.numel())
    size = 128 if is_small else 8192
    a, b = torch.randn(2, size, size, dtype=DTYPE, device=figures.device)
    seconds = figures.time(lambda: a @ b, in_graph=False)
    figures.matmul_tflops = 2 * size**3 / seconds / 1e12
    figures.add("device", f"bf16 matmul {size}", seconds, num_flops=2 * size**3)


def measure_decode_attention(figures: Figures, *, is_small: bool) -> None:
    """One query token a sequence; torch's SDPA on keys that lie in a row beside it."""
    for batch, length in decode_shapes(is_small=is_small):
        case = attention_case(
            [1] * batch, [length] * batch, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE, figures.device
        )  # fmt: skip
        num_bytes = 2 * batch * length * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
        rounds = 2 if is_small else 20
        seconds = figures.time(partial(paged_attention, *case, scale=HEAD_DIM**-0.5), rounds=rounds)
        figures.add("decode attention", f"batch {batch}, {length} keys", seconds, num_bytes=num_bytes)
        query = case[0][:, :, None]
        key, value = torch.randn(2, batch, NUM_KV_HEADS, length, HEAD_DIM, dtype=DTYPE, device=figures.device)

        def sdpa(query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

        figures.add(
            "decode SDPA", f"batch {batch}, {length} keys", figures.time(sdpa, rounds=rounds), num_bytes=num_bytes
        )


def measure_prefill_attention(figures: Figures, *, is_small: bool) -> None:
    """One prompt; torch's SDPA beside it."""
    for length in prompt_lengths(is_small=is_small):
        case = attention_case([length], [length], NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE, figures.device)
        num_flops = 2 * length * length * HEAD_DIM * NUM_HEADS  # causal: half of the products
        rounds = 1 if is_small else 20
        seconds = figures.time(partial(paged_attention, *case, scale=HEAD_DIM**-0.5), rounds=rounds)
        figures.add("prefill attention", f"{length} tokens", seconds, num_flops=num_flops)
        query = case[0].transpose(0, 1)[None].contiguous()
        key, value = torch.randn(2, 1, NUM_KV_HEADS, length, HEAD_DIM, dtype=DTYPE, device=figures.device)

        def sdpa(query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        figures.add("prefill SDPA", f"{length} tokens", figures.time(sdpa, rounds=rounds), num_flops=num_flops)


def measure_rows(figures: Figures, *, is_small: bool) -> None:
    """Norms, gates, cache writes and sampling."""
    device, shrink = figures.device, 64 if is_small else 1
    size = DTYPE.itemsize
    for n in (2,) if is_small else (1, 256, 8192):
        x, residual = torch.randn(2, n, HIDDEN // shrink, dtype=DTYPE, device=device)
        weight = torch.ones(HIDDEN // shrink, dtype=DTYPE, device=device)
        seconds = figures.time(partial(add_rms_norm, x, residual, weight, 1e-5))
        figures.add("add_rms_norm", f"{n} tokens", seconds, num_bytes=4 * x.numel() * size)
        gate = torch.randn(n, 2 * INTERMEDIATE // shrink, dtype=DTYPE, device=device)
        seconds = figures.time(partial(act_and_mul, gate, "silu"))
        figures.add("act_and_mul", f"{n} tokens", seconds, num_bytes=1.5 * gate.numel() * size)
        qkv = torch.randn(n, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, dtype=DTYPE, device=device)
        caches = torch.zeros(2, n, 16, NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
        slots = torch.arange(n, device=device)
        angles = torch.randn(n, 1, HEAD_DIM // 2, device=device)
        rotary = (angles.cos(), angles.sin())
        seconds = figures.time(partial(rope_store, qkv, *caches, slots, rotary=rotary, has_skips=False))
        figures.add("rope_store", f"{n} tokens", seconds, num_bytes=2 * qkv.numel() * size)
    for n in (2,) if is_small else (1, 64, 256):
        logits = torch.randn(n, VOCAB // shrink, device=device) * 3
        keys = torch.arange(n, device=device)
        options = {
            "temperature": torch.full((n,), 0.7, device=device),
            "top_k": torch.full((n,), 20, device=device),
            "top_p": torch.full((n,), 0.95, device=device),
        }
        for names in (["temperature"], ["temperature", "top_p"], ["temperature", "top_k", "top_p"]):
            chosen = {name: options[name] for name in names}
            seconds = figures.time(partial(sample_tokens, logits, keys, **chosen), rounds=5)
            figures.add("sample_tokens", f"{n} rows, {' '.join(names)}", seconds, num_bytes=logits.numel() * 4)
        seconds = figures.time(partial(top_logprobs, logits, keys, 5), rounds=5)
        figures.add("top_logprobs", f"{n} rows, 5 each", seconds, num_bytes=logits.numel() * 4)
