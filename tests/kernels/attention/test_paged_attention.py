"""Attention over the paged cache equals one softmax per query token, for any mix of chunks and decodes."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_kernels.attention import paged_attention as paged_attention_module
from pagoda_kernels.attention import plan as attention_plan
from pagoda_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.native.library import load_native, native
from pagoda_kernels.selection import use_references

CPU = torch.device("cpu")
SIZES = (1, 15, 16, 17, 63, 64, 65, 300)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MIXED = ([1, 5, 17, 1, 64, 16, 1, 70, 1], [300, 65, 17, 1, 100, 200, 17, 1050, 1100])


@pytest.fixture(autouse=True, params=["native", "torch"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs with the C++ kernel and without."""
    if request.param == "native":
        assert load_native(), "this machine has a compiler"
    use_references(() if request.param == "native" else ("paged_attention",))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # what the references compute is small: threads that wait for each other are slower
    yield request.param
    torch.set_num_threads(before)
    use_references(())


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 20,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    first_block: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan]:
    """Query, caches filled with NaN where no sequence has a block, and the plan."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-length // block_size) for length in seq_lens]
    total = sum(num_blocks) + 5
    ids = (torch.randperm(total - first_block, generator=generator) + first_block).tolist()
    table = np.full((len(seq_lens), max(num_blocks, default=1) + 2), 2**31 - 1, dtype=np.int32)
    shape = (total, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    for row, count in enumerate(num_blocks):
        for column in range(count):
            block = ids.pop()
            table[row, column] = block
            for cache in (k_cache, v_cache):
                cache[block] = torch.randn(shape[1:], generator=generator).to(dtype)
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    plan = AttentionPlan(np.array(query_lens), np.array(seq_lens), table, block_size, dtype, CPU)
    return query, k_cache, v_cache, plan


def check(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float = 0.3,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    tolerance = tolerance or TOLERANCE[query.dtype]
    actual = paged_attention(query, k_cache, v_cache, plan, scale=scale, **options)
    expected = paged_attention_reference(query, k_cache, v_cache, plan, scale=scale, **options)
    assert actual.dtype == expected.dtype
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
def test_a_prompt_alone(size: int, dtype: torch.dtype) -> None:
    check(*make_case([size], [size], dtype=dtype))


@pytest.mark.parametrize("path", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_long_prompt(dtype: torch.dtype) -> None:
    check(*make_case([1000], [1000], num_heads=2, num_kv_heads=1, dtype=dtype))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("num_heads", [13, 33, 48, 71])
def test_many_heads_of_one_kv_head(num_heads: int, size: int, num_threads: int) -> None:
    """Those of one token alone can be more than a task is to have."""
    case = make_case([size, 1], [size + 17, 5], num_heads=num_heads, num_kv_heads=1)
    torch.set_num_threads(num_threads)
    check(*case)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decodes_of_all_lengths_together(dtype: torch.dtype) -> None:
    check(*make_case([1] * len(SIZES), list(SIZES), dtype=dtype))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 1000])
def test_chunks_and_decodes_mixed_with_a_sliding_window(window: int) -> None:
    check(*make_case([1, 5, 17, 1, 64, 16, 1], [300, 65, 17, 1, 100, 200, 17]), window=window)


def without_what_left_the_window(
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan], window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan]:
    """The same case, where blocks that no query sees are others' by now: NaN under their numbers."""
    query, k_cache, v_cache, plan = case
    k_cache[0] = v_cache[0] = torch.nan
    table = plan.block_table.copy()
    assert 0 not in table
    for row, (query_len, seq_len) in enumerate(zip(plan.query_lens, plan.seq_lens, strict=True)):
        num_left = max(0, seq_len - query_len - window + 1) // plan.block_size
        for column, block in enumerate(table[row, :num_left]):
            k_cache[block] = v_cache[block] = torch.nan
            if column % 2:
                table[row, column] = 0
    return (
        query,
        k_cache,
        v_cache,
        AttentionPlan(plan.query_lens, plan.seq_lens, table, plan.block_size, plan.dtype, plan.device),
    )


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.parametrize("window", [1, 17, 40, 500])
def test_blocks_that_left_the_window_are_not_read(
    window: int, head_dim: int, dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    case = make_case(*MIXED, head_dim=head_dim, dtype=dtype, first_block=1)
    check(*without_what_left_the_window(case, window), window=window)


@functools.cache
def attended_by_chunks(chunk: int, dtype: torch.dtype) -> torch.Tensor:
    """What every token of MIXED sees of its own chunk, one token after the other."""
    query, k_cache, v_cache, plan = make_case(*MIXED, dtype=dtype)
    expected: list[torch.Tensor] = []
    for row, (query_len, seq_len) in enumerate(zip(*MIXED, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            alone = AttentionPlan(
                np.array([1]), np.array([position + 1]), plan.block_table[row : row + 1], 16, dtype, CPU
            )
            one = query[len(expected) : len(expected) + 1]
            expected.append(
                paged_attention_reference(one, k_cache, v_cache, alone, scale=0.3, window=position % chunk + 1)
            )
    return torch.cat(expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk", [16, 64, 80, 2048])
def test_a_query_sees_the_keys_of_its_own_chunk_alone(chunk: int, dtype: torch.dtype) -> None:
    query, k_cache, v_cache, plan = make_case(*MIXED, dtype=dtype)
    attended = paged_attention(query, k_cache, v_cache, plan.chunked(chunk), scale=0.3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(attended, attended_by_chunks(chunk, dtype), atol=tolerance, rtol=tolerance)


def test_blocks_before_a_chunk_are_not_read() -> None:
    query, k_cache, v_cache, plan = make_case(*MIXED)
    expected = paged_attention(query, k_cache, v_cache, plan.chunked(64), scale=0.3)
    for row, (query_len, seq_len) in enumerate(zip(*MIXED, strict=True)):
        for block in plan.block_table[row, : (seq_len - query_len) // 64 * 4]:
            k_cache[block] = v_cache[block] = torch.nan
    plan = AttentionPlan(plan.query_lens, plan.seq_lens, plan.block_table, 16, torch.float32, CPU)
    assert torch.equal(paged_attention(query, k_cache, v_cache, plan.chunked(64), scale=0.3), expected)


def test_a_chunk_must_begin_where_a_block_does() -> None:
    with pytest.raises(ValueError, match="chunk is 24, must be a multiple of block_size, 16"):
        make_case([1], [5])[3].chunked(24)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 40])
def test_attention_sinks(window: int | None, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    sinks = torch.tensor([-30.0, 0.0, 1.0, 2.0, 50.0, -torch.inf])
    case = make_case(*MIXED, dtype=dtype)
    check(*case, window=window, sinks=sinks)
    check(*case, window=window, sinks=sinks, softcap=0.5)
    attended = paged_attention(*case, scale=0.3, window=window, sinks=sinks).view(-1, 6, 20)
    assert attended[:, 4].abs().max() < 1e-4, "nearly all of the weight is the sink's"


@pytest.mark.parametrize("path", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [20, 64, 128])
@pytest.mark.parametrize("window", [None, 90])
def test_scores_far_above_those_before(window: int | None, head_dim: int, dtype: torch.dtype) -> None:
    """Of 256 tokens each tile has higher scores than the one before, by more than sums stay unscaled for."""
    query, k_cache, v_cache, plan = make_case(*MIXED, head_dim=head_dim, dtype=dtype)
    for seq_len, blocks in zip(MIXED[1], plan.block_table, strict=True):
        for position in range(seq_len):
            k_cache[blocks[position // 16], position % 16, :, 0] = position % 256 / 16
    query *= 0.1
    query[..., 0] = 8.0  # a tile of 64 has weights up to 2^46 times those of the one before
    tolerance = max(1e-4, TOLERANCE[dtype])  # scores of 128 are rounded to 1e-5
    check(query, k_cache, v_cache, plan, scale=1.0, tolerance=tolerance, window=window)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 17])
def test_soft_capped_scores(window: int | None, dtype: torch.dtype) -> None:
    case = make_case([1, 5, 17, 1, 64, 16, 1], [300, 65, 17, 1, 100, 200, 17], dtype=dtype)
    check(*case, window=window, softcap=0.5)
    capped = paged_attention(*case, scale=0.3, softcap=0.5)
    assert (capped - paged_attention(*case, scale=0.3)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_linear_biases(softcap: float | None, dtype: torch.dtype) -> None:
    case = make_case([1, 5, 17, 1, 64, 16, 1], [300, 65, 17, 1, 100, 200, 17], dtype=dtype)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.01, 0.001, 0.0])
    check(*case, softcap=softcap, alibi_slopes=slopes)
    check(*case, softcap=softcap, alibi_slopes=slopes, window=30)


def test_soft_capped_scores_of_many_queries_are_held_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention_module, "MAX_SCORES", 1000)
    check(*make_case([64, 1, 100, 1], [200, 65, 100, 300]), softcap=0.5)
    check(*make_case([1, 1, 1], [200, 65, 100]), window=20, softcap=0.5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 3)])
def test_head_groups(num_heads: int, num_kv_heads: int) -> None:
    check(*make_case([1, 7, 1], [33, 20, 64], num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 128])
@pytest.mark.parametrize(("num_queries", "num_heads"), [(1, 6), (2, 3)])
def test_two_rows_of_each_kv_head(num_queries: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Of two heads and one query, or of one head and two queries: keys and values may stay where they lie."""
    lens = ([num_queries] * 4, [300, 65, 17, 1100])
    check(*make_case(*lens, num_heads=num_heads, num_kv_heads=3, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_sizes(block_size: int) -> None:
    check(*make_case([1, 7, 1, 40], [33, 20, 64, 41], block_size=block_size), window=10)


def test_a_batch_too_large_for_one_group_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(["paged_attention"])
    monkeypatch.setattr(attention_plan, "SMALL_BATCH_TOKENS", 64)
    monkeypatch.setattr(attention_plan, "MAX_GROUP_TOKENS", 128)
    lengths = [1, 300, 17, 64, 2, 65, 64, 63, 5]
    query, k_cache, v_cache, plan = make_case([1, 1, 1, 1, 2, 1, 1, 1, 1], lengths)
    assert len(plan.window(None).decodes) > 3
    check(query, k_cache, v_cache, plan)
    check(query, k_cache, v_cache, plan, window=20)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [1, 33, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (8, 2), (8, 1)])
def test_head_sizes_and_groups(head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    lens = ([1, 17, 40, 1], [300, 65, 40, 16])
    check(*make_case(*lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype), window=50)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 7, 256])
def test_everything_at_once(block_size: int, dtype: torch.dtype) -> None:
    case = make_case(*MIXED, block_size=block_size, dtype=dtype)
    check(*case)
    check(*case, window=70, softcap=30.0, alibi_slopes=torch.linspace(0, 0.05, 6))


def test_the_plan_of_the_native_path_makes_no_masks(path: str) -> None:
    query, k_cache, v_cache, plan = make_case([1, 5], [300, 65])
    paged_attention(query, k_cache, v_cache, plan, scale=1.0)
    assert bool(plan._windows) == (path == "torch")


def test_a_query_that_is_a_part_of_a_wider_projection() -> None:
    query, k_cache, v_cache, plan = make_case([1, 5, 20], [30, 65, 20])
    wide = torch.cat((query, torch.full_like(query, torch.nan)), dim=1)
    part = wide[:, : query.shape[1]]
    assert not part.is_contiguous()
    check(part, k_cache, v_cache, plan)


def test_a_nan_of_a_sequence_stays_its_own() -> None:
    query, k_cache, v_cache, plan = make_case(*MIXED)
    expected = paged_attention(query, k_cache, v_cache, plan, scale=0.3)
    token = 1 + 5 + 17
    query[token] = torch.nan
    actual = paged_attention(query, k_cache, v_cache, plan, scale=0.3)
    assert actual[token].isnan().all()
    others = torch.arange(query.shape[0]) != token
    assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("path", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_nan_does_not_stay_behind_in_a_thread(softcap: float | None, window: int | None, dtype: torch.dtype) -> None:
    query, *rest = make_case([300, 1200, 1], [1100, 1200, 40], head_dim=64, dtype=dtype)
    options = {"scale": 0.3, "softcap": softcap, "window": window}
    expected = paged_attention(query, *rest, **options)
    assert paged_attention(torch.full_like(query, torch.nan), *rest, **options).isnan().all()
    assert torch.equal(paged_attention(query, *rest, **options), expected)


@pytest.mark.parametrize("path", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_kv_heads", [6, 3, 2])
def test_what_lies_after_a_sequence_makes_no_difference(num_kv_heads: int, dtype: torch.dtype) -> None:
    lengths = [1, 17, 63, 200, 40]
    case = make_case([1, 1, 1, 1, 9], lengths, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype)
    _, k_cache, v_cache, plan = case
    expected = paged_attention(*case, scale=0.3)
    for row, length in enumerate(lengths):
        last = plan.block_table[row, (length - 1) // 16]
        for cache, junk in ((k_cache, torch.nan), (v_cache, torch.inf)):
            cache[last, (length - 1) % 16 + 1 :] = junk
    assert torch.equal(paged_attention(*case, scale=0.3), expected)


def part_of(plan: AttentionPlan, row: int, query_len: int, seq_len: int) -> AttentionPlan:
    """A batch of `query_len` tokens of one sequence, up to `seq_len`."""
    table = plan.block_table[row : row + 1].copy()
    return AttentionPlan(np.array([query_len]), np.array([seq_len]), table, plan.block_size, plan.dtype, CPU)


HEAD_DIMS = (40, 64, 96)
NUMS_KV_HEADS = (6, 3, 2)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 900}, {"softcap": 30.0})


@pytest.mark.parametrize("path", ["native"], indirect=True)
@pytest.mark.parametrize(
    ("options", "num_kv_heads", "head_dim", "dtype"),
    [
        (options, num_kv_heads, HEAD_DIMS[(one + other + third) % 3], dtype)  # every two values meet
        for one, options in enumerate(OPTIONS)
        for other, num_kv_heads in enumerate(NUMS_KV_HEADS)
        for third, dtype in enumerate(TOLERANCE)
    ],
    ids=str,
)
def test_a_tokens_bits_depend_on_its_own_sequence_alone(
    options: dict[str, Any], num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Neither neighbours, nor threads, nor how a prompt is cut, nor whether it is one: the C++ kernel promises that."""
    assert native("paged_attention") is not None
    lens = [1, 300, 1200, 5, 1], [2500, 300, 2300, 1030, 40]
    query, k_cache, v_cache, plan = make_case(*lens, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    torch.set_num_threads(1)
    expected = paged_attention(query, k_cache, v_cache, plan, scale=0.3, **options)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        assert torch.equal(paged_attention(query, k_cache, v_cache, plan, scale=0.3, **options), expected)
    first = 0
    for row, (query_len, seq_len) in enumerate(zip(*lens, strict=True)):
        for size in (1, 7, 500, 5000):
            for start in range(0, query_len, size)[:3]:
                end = min(start + size, query_len)
                alone = part_of(plan, row, end - start, seq_len - query_len + end)
                span = slice(first + start, first + end)
                actual = paged_attention(query[span], k_cache, v_cache, alone, scale=0.3, **options)
                assert torch.equal(actual, expected[span]), (row, start, end)
        first += query_len


def test_an_empty_batch_gives_an_empty_output() -> None:
    query, k_cache, v_cache, plan = make_case([], [])
    assert paged_attention(query, k_cache, v_cache, plan, scale=1.0).shape == (0, 120)


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, k_cache, v_cache, plan = make_case([1], [5], block_size=16)
    with pytest.raises(ValueError, match="does not fit"):
        paged_attention(query[..., :10], k_cache, v_cache, plan, scale=1.0)
    with pytest.raises(ValueError, match="does not fit"):
        paged_attention(query[:, :3], k_cache, v_cache, plan, scale=1.0)
    with pytest.raises(ValueError, match="blocks of 8"):
        paged_attention(query, k_cache[:, :8], v_cache[:, :8], plan, scale=1.0)
