"""The Triton attention kernel equals one softmax per query token, for any mix of prompts, chunks and decodes."""

from typing import Any

import pytest
import torch

from pagoda_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.selection import triton_kernel, use_references
from tests.kernels.attention.test_paged_attention import make_case, without_what_left_the_window
from tests.kernels.triton.outputs import nan_filled_outputs

SIZES = (1, 15, 16, 17, 300)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan]


def check(case: Case, **options: Any) -> None:
    """The kernel against the reference; the output holds NaN before."""
    query, k_cache, v_cache, plan = case
    kernel = triton_kernel("paged_attention", query)
    with nan_filled_outputs():
        actual = kernel(query, k_cache, v_cache, plan.tables(), scale=0.3, **options)
    options.pop("num_splits", None)
    expected = paged_attention_reference(query, k_cache, v_cache, plan, scale=0.3, **options)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[query.dtype], rtol=TOLERANCE[query.dtype])


@pytest.mark.parametrize("size", SIZES)
def test_a_prompt_alone(size: int) -> None:
    check(make_case([size], [size], num_heads=2, num_kv_heads=1))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_chunks_and_decodes_mixed(dtype: torch.dtype) -> None:
    check(make_case([1, 5, 17, 1, 1], [300, 65, 17, 1, 17], dtype=dtype))


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_decodes_of_all_lengths_together(num_splits: int) -> None:
    check(make_case([1] * len(SIZES), list(SIZES)), num_splits=num_splits)


def test_a_long_context() -> None:
    check(make_case([1, 9], [1000, 1000], num_heads=2, num_kv_heads=1), num_splits=4)


@pytest.mark.parametrize(("window", "num_splits"), [(1, 1), (16, 4), (40, 1), (40, 4), (1000, 2)])
def test_sliding_windows(window: int, num_splits: int) -> None:
    check(make_case([1, 5, 40, 1], [150, 65, 100, 17]), window=window, num_splits=num_splits)


@pytest.mark.parametrize(("window", "num_splits"), [(1, 1), (40, 1), (40, 4), (70, 2)])
def test_blocks_that_left_the_window_are_not_read(window: int, num_splits: int) -> None:
    case = make_case([1, 5, 40, 1], [150, 65, 100, 17], first_block=1)
    check(without_what_left_the_window(case, window), window=window, num_splits=num_splits)


@pytest.mark.parametrize("window", [None, 17])
def test_soft_capped_scores(window: int | None) -> None:
    check(make_case([1, 17, 1], [200, 40, 17]), window=window, softcap=0.5, num_splits=2)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_linear_biases(softcap: float | None) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.01, 0.001, 0.0])
    check(make_case([1, 17, 1], [200, 40, 17]), softcap=softcap, alibi_slopes=slopes, num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_attention_sinks(num_splits: int) -> None:
    sinks = torch.tensor([-3.0, 0.0, 1.0, 2.0, 5.0, -torch.inf])
    check(make_case([1, 17, 1], [200, 40, 17]), sinks=sinks, num_splits=num_splits)
    check(make_case([1, 17, 1], [200, 40, 17]), sinks=sinks, window=20, num_splits=num_splits)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    check(make_case([1, 17], [33, 20], num_heads=2, num_kv_heads=1, head_dim=head_dim), num_splits=2)


@pytest.mark.parametrize("group", [1, 4, 7, 8, 17])
def test_head_groups(group: int) -> None:
    check(make_case([1, 7, 1], [33, 20, 64], num_heads=2 * group, num_kv_heads=2))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_sizes(block_size: int) -> None:
    check(make_case([1, 40], [33, 41], block_size=block_size), window=10)


def test_queries_and_caches_may_be_views() -> None:
    query, k_cache, v_cache, plan = make_case([1, 7], [33, 20])
    wide = torch.cat((query, query), dim=1)[:, 3:9]
    both = torch.stack((k_cache, v_cache), dim=1)
    check((wide, both[:, 0], both[:, 1], plan))


def test_an_empty_batch_gives_an_empty_output() -> None:
    query, k_cache, v_cache, plan = make_case([], [])
    assert paged_attention(query, k_cache, v_cache, plan, scale=1.0).shape == (0, 120)


def test_the_operation_takes_the_kernel_unless_it_is_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    query, k_cache, v_cache, plan = make_case([1, 7], [33, 20])
    paged_attention(query, k_cache, v_cache, plan, scale=0.3)
    assert plan.device_tables is not None, "the kernel reads them"
    use_references(["paged_attention"])
    try:
        query, k_cache, v_cache, plan = make_case([1, 7], [33, 20])
        paged_attention(query, k_cache, v_cache, plan, scale=0.3)
        assert plan.device_tables is None
    finally:
        use_references(())
    for _ in range(2):
        paged_attention(*make_case([1, 7], [33, 20], head_dim=320), scale=0.3)
    assert caplog.text.count("head_dim is 320, more than 256: attention runs as plain PyTorch") == 1
