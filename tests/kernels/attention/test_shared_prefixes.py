"""Sequences whose block tables begin alike get the same bits from the C++ attention as each of them alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from pagoda_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.quantized_cache import quantize_rows
from pagoda_kernels.native.library import load_native

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32

Sequence: TypeAlias = tuple[int, int, tuple[tuple[str, int], ...]]
"""query_len, seq_len, and the prefixes that its table begins with: a name and a number of tokens each."""


@pytest.fixture(autouse=True)
def native_kernels() -> Iterator[None]:
    assert load_native(), "this machine has a compiler"
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class Batch:
    """A ragged batch over a cache of random numbers."""

    sequences: list[Sequence]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 40
    block_size: int = 16
    dtype: torch.dtype = F32
    is_int8: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Together on 1, 2 and 3 threads, and one at a time: the same bits, and about those of the reference."""
        generator = torch.Generator().manual_seed(0)
        table, total = self._table()
        shape = (total, self.block_size, self.num_kv_heads, self.head_dim)
        caches = [torch.randn(shape, generator=generator).to(self.dtype) for _ in range(2)]
        if self.is_int8:
            caches = [quantize_rows(cache) for cache in caches]
        query_lens, seq_lens = (np.array([sequence[i] for sequence in self.sequences]) for i in range(2))
        query = torch.randn(int(query_lens.sum()), self.num_heads, self.head_dim, generator=generator).to(self.dtype)

        def attend(query: torch.Tensor, rows: slice, function: Any = paged_attention) -> torch.Tensor:
            plan = AttentionPlan(query_lens[rows], seq_lens[rows], table[rows], self.block_size, self.dtype, CPU)
            result: torch.Tensor = function(query, *caches, plan, scale=0.3, **self.options)
            return result

        torch.set_num_threads(1)
        ends = np.cumsum(query_lens)
        alone = torch.cat(
            [
                attend(query[end - count : end], slice(row, row + 1))
                for row, (count, end) in enumerate(zip(query_lens, ends, strict=True))
            ]
        )
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            together = attend(query, slice(None))
            differs = (together != alone).any(dim=1).nonzero().flatten()
            assert torch.equal(together, alone), f"tokens {differs.tolist()} on {count} threads"
        tolerance = 1e-5 if self.dtype == F32 else 2e-2
        expected = attend(query, slice(None), paged_attention_reference)
        torch.testing.assert_close(alone, expected, atol=tolerance, rtol=tolerance)

    def _table(self) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int32]], int]:
        """[num_seqs, max_blocks], out of range after a sequence's last block; and how many blocks there are."""
        width = max(-(-seq_len // self.block_size) for _, seq_len, _ in self.sequences) + 1
        table = np.full((len(self.sequences), width), 2**31 - 1, dtype=np.int32)
        known: dict[tuple[str, int], int] = {}
        total = 0
        for row, (_, seq_len, prefixes) in enumerate(self.sequences):
            for column in range(-(-seq_len // self.block_size)):
                name = next((name for name, count in prefixes if (column + 1) * self.block_size <= count), f"own {row}")
                if (name, column) not in known:
                    known[name, column] = total
                    total += 1
                table[row, column] = known[name, column]
        order = np.random.default_rng(0).permutation(total).astype(np.int32)
        is_used = table < total
        table[is_used] = order[table[is_used]]
        return table, total


def decodes(
    num_members: int, num_shared: int, *, name: str = "a"
) -> list[tuple[int, int, tuple[tuple[str, int], ...]]]:
    """Members of different lengths, the shortest of which has one token of its own."""
    return [(1, num_shared + 1 + (37 * i) % 150, ((name, num_shared),)) for i in range(num_members)]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("num_members", [2, 3, 7, 40])
@pytest.mark.parametrize("num_shared", [16, 64, 200, 1024, 1100, 2300])
def test_decodes(num_members: int, num_shared: int, dtype: torch.dtype) -> None:
    if num_members == 40 and num_shared > 1100:
        num_members = 20  # the reference takes long
    Batch(decodes(num_members, num_shared), dtype=dtype).check()


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (8, 2), (8, 1), (16, 2)])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_head_groups_and_int8(
    head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype, is_int8: bool
) -> None:
    Batch(
        decodes(5, 700) + decodes(3, 1040, name="b"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        is_int8=is_int8,
    ).check()


@pytest.mark.parametrize("block_size", [1, 7, 48, 256, 1024])
def test_block_sizes(block_size: int) -> None:
    Batch(decodes(6, 1300), block_size=block_size).check()


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_groups_prompts_drafts_and_loners_in_one_batch(dtype: torch.dtype) -> None:
    deep, shallow = (("a", 1120),), (("b", 200),)
    sequences = [
        (1, 1300, deep),
        (5, 1200, deep),  # drafts
        (2, 1122, deep),
        (5, 1122, deep),  # its drafts begin within the shared blocks
        (1, 600, (("a", 300),)),
        (1, 150, (("a", 150),)),  # shorter than what the others share
        (1, 40, (("a", 40),)),
        (1, 1, ()),
        (300, 1300, deep),  # a prompt's chunk after a cached prefix
        (1, 900, shallow),
        (1, 2500, shallow),
        (1, 201, shallow),
        (70, 70, ()),
        (1, 1300, ()),
        (3, 800, ()),
    ]
    Batch(sequences, dtype=dtype).check()
    Batch(sequences[::-1], dtype=dtype, num_heads=3, num_kv_heads=3).check()


def test_prefixes_within_prefixes() -> None:
    """Each pair goes on together after what all have in common, which may save more than one large group."""
    sequences = [(1, 1500 + 10 * row, (("all", 128), (f"pair {row // 2}", 1400))) for row in range(6)]
    Batch(sequences).check()


def test_the_same_table_twice() -> None:
    Batch([(1, 1024, (("a", 1024),))] * 2 + [(4, 1028, (("a", 1028),))] * 2).check()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 500},  # the window of some members has left their first keys
        {"window": 5000},
        {"softcap": 20.0},
        {"alibi_slopes": torch.linspace(0, 0.05, 6)},
        {"alibi_slopes": torch.linspace(0, 0.05, 6), "softcap": 20.0, "window": 1500},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options: dict[str, Any]) -> None:
    sequences = decodes(6, 400) + decodes(4, 1200, name="b") + [(3, 450, (("a", 400),)), (3, 1400, (("b", 1200),))]
    Batch(sequences, options=options).check()


def test_more_rows_than_one_task_takes() -> None:
    Batch(decodes(60, 320), num_heads=16, num_kv_heads=2, head_dim=16).check()
