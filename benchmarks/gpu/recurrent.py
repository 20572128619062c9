"""Recurrent layers on a GPU at the shapes of Qwen3-Next-80B-A3B and of Nemotron-H-8B: bytes of states, and prompts."""

from functools import partial

import numpy as np
import torch

from benchmarks.gpu.tools.timing import Figures
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_kernels.recurrent.gated_delta_rule import gated_delta_rule
from pagoda_kernels.recurrent.state_space_scan import state_space_scan


def measure_recurrent(figures: Figures, *, is_small: bool) -> None:
    """Decodes of several batches, then one prompt."""
    cases = ((2, 1), (1, 20)) if is_small else ((1, 1), (64, 1), (256, 1), (1, 2048), (8, 1024))
    for num_seqs, length in cases:
        batch = RecurrentBatch(query_lens=np.full(num_seqs, length), rows=np.arange(num_seqs), device=figures.device)
        batch.columns()
        _delta_rule(figures, batch, num_seqs, length, is_small=is_small)
        _scan(figures, batch, num_seqs, length, is_small=is_small)


def _delta_rule(figures: Figures, batch: RecurrentBatch, num_seqs: int, length: int, *, is_small: bool) -> None:
    num_keys, num_values, dim = (2, 4, 20) if is_small else (16, 32, 128)
    device, num_tokens = figures.device, num_seqs * length
    query, key = torch.randn(2, num_tokens, num_keys, dim, device=device)
    value = torch.randn(num_tokens, num_values, dim, device=device)
    states = torch.randn(num_seqs, num_values, dim, dim, device=device)
    beta, decay = torch.rand(num_tokens, num_values, device=device), -torch.rand(num_tokens, num_values, device=device)
    run = partial(gated_delta_rule, query, key, value, decay, beta, states, batch)
    seconds = figures.time(run, rounds=2 if is_small else 10)
    num_bytes = 2.0 * states.numel() * 4 if length == 1 else 0
    figures.add("gated_delta_rule", f"{num_seqs} of {length} tokens", seconds, num_bytes=num_bytes)


def _scan(figures: Figures, batch: RecurrentBatch, num_seqs: int, length: int, *, is_small: bool) -> None:
    num_heads, num_groups, head_dim, state_size = (4, 2, 10, 20) if is_small else (128, 8, 64, 128)
    device, num_tokens = figures.device, num_seqs * length
    x = torch.randn(num_tokens, num_heads, head_dim, device=device)
    states = torch.randn(num_seqs, num_heads, state_size, head_dim, device=device)
    b, c = torch.randn(2, num_tokens, num_groups, state_size, device=device)
    step = torch.randn(num_tokens, num_heads, device=device)
    bias, decay, skip = torch.randn(3, num_heads, device=device)
    heads = {"step_bias": bias, "decay_log": decay, "skip": skip}
    run = partial(state_space_scan, x, b, c, step, states, batch, **heads)
    seconds = figures.time(run, rounds=2 if is_small else 10)
    num_bytes = 2.0 * states.numel() * 4 if length == 1 else 0
    figures.add("state_space_scan", f"{num_seqs} of {length} tokens", seconds, num_bytes=num_bytes)
