"""Checks and times other packages' attention against Pagoda's, over synthetic steps with a model's heads."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.attention.paged_attention import paged_attention
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.external.adapter import Adapter, AttentionNeeds
from pagoda_worker.attention.table import OURS, AttentionTable, StepShape, shape_of

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Measures the seconds that a call takes."""

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""Absolute and relative tolerance, for weights that are rounded to the data type before values are summed."""
CHECKED = ([1, 1, 17, 64, 1, 16], [300, 17, 300, 64, 1, 100])
"""Query tokens and keys of the sequences in the comparison."""
CHECKED_WINDOW = 20
"""Windows in that batch: an error of one key would not be visible among thousands."""
POOL_BYTES = 512 << 20
"""Bytes of keys, and of values, that are read: more than device caches hold."""
KEYS = (256, 2048, 16384)
"""Numbers of keys of a sequence in timed steps."""
MAX_STEP_KEYS = 1 << 20
"""Maximum number of keys over all sequences of a timed step; larger caches are rare."""
ROUNDS = 5


class Lens(NamedTuple):
    """A step."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBounds:
    """Limits of the steps that the worker serves."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Batch:
    """A query, a cache of one layer, and the tables of a step."""

    def __init__(self, lens: Lens, needs: AttentionNeeds, device: torch.device, pool_bytes: int = POOL_BYTES) -> None:
        """The cache has at most `pool_bytes` for keys and for values, plus one block: sequences share blocks if more
        are needed. A block without a sequence holds NaN."""
        self.lens, self._needs, self._device = lens, needs, device
        self._query_lens, self._seq_lens = np.array(lens.query_lens), np.array(lens.seq_lens)
        counts = -(-self._seq_lens // needs.block_size)
        shape = (needs.block_size, needs.num_kv_heads, needs.head_dim)
        block_bytes = int(np.prod(shape)) * needs.dtype.itemsize
        num_blocks = max(1, min(int(counts.sum()), pool_bytes // block_bytes))
        ids = np.random.default_rng(0).permutation(num_blocks).astype(np.int32) + 1
        self._block_table = np.zeros((counts.size, int(counts.max())), dtype=np.int32)
        is_owned = np.arange(self._block_table.shape[1]) < counts[:, None]
        self._block_table[is_owned] = np.resize(ids, int(counts.sum()))
        generator = torch.Generator(device)
        generator.manual_seed(0)

        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, dtype=needs.dtype, device=device)

        self.query = random(sum(lens.query_lens), needs.num_heads, needs.head_dim)
        self.k_cache, self.v_cache = (random(num_blocks + 1, *shape) for _ in range(2))
        self.k_cache[0] = self.v_cache[0] = torch.nan

    @property
    def shape(self) -> StepShape:
        """Its name in the table."""
        return shape_of(self._query_lens, self._seq_lens)

    def attend(self, adapter: Adapter | None) -> list[Tensor]:
        """A step's attention, for all layers over the same cache. None: Pagoda's kernels."""
        plan = AttentionPlan(
            query_lens=self._query_lens,
            seq_lens=self._seq_lens,
            block_table=self._block_table,
            block_size=self._needs.block_size,
            dtype=self._needs.dtype,
            device=self._device,
            backend=adapter,
        )
        return [
            paged_attention(self.query, self.k_cache, self.v_cache, plan, **layer._asdict())
            for layer in self._needs.layers
        ]


def difference(adapter_type: type[Adapter], needs: AttentionNeeds, device: torch.device) -> float:
    """The largest difference of a package's results from Pagoda's, in tolerances: at most 1 is correct, NaN counts as
    infinite.

    Raises what the package raises.
    """
    layers = tuple(
        layer._replace(window=None if layer.window is None else min(layer.window, CHECKED_WINDOW))
        for layer in dict.fromkeys(needs.layers)
    )
    needs = replace(needs, layers=layers)
    batch = Batch(Lens(*CHECKED), needs, device)
    worst = 0.0
    for theirs, ours in zip(batch.attend(adapter_type(needs=needs, device=device)), batch.attend(None), strict=True):
        if theirs.shape != ours.shape:
            return float("inf")
        gap = (theirs.double() - ours.double()).abs() / (1 + ours.double().abs())
        worst = max(worst, float(gap.nan_to_num(nan=torch.inf).max()) / TOLERANCE[needs.dtype])
    return worst


def steps_to_measure(bounds: StepBounds) -> list[Lens]:
    """A few shapes of every kind, within the bounds; other shapes use the nearest."""
    longest, tokens = bounds.max_model_len, bounds.max_num_batched_tokens
    steps: list[Lens] = []
    for batch in sorted({min(batch, bounds.max_num_seqs, tokens) for batch in (1, 8, 64, 256)}):
        keys_of_each = sorted({min(keys, longest) for keys in KEYS})
        steps += [Lens([1] * batch, [keys] * batch) for keys in keys_of_each if batch * keys <= MAX_STEP_KEYS]
    for chunk in sorted({min(chunk, tokens, longest) for chunk in (128, 512, tokens)}):
        steps += [Lens([chunk], [keys]) for keys in sorted({chunk, min(chunk + KEYS[1], longest)}) if chunk > 1]
    decodes = min(32, bounds.max_num_seqs - 1, tokens // 2)
    for chunk in sorted({min(chunk, tokens - decodes, longest) for chunk in (512, tokens)}):
        keys = min(KEYS[1], longest)
        if decodes and chunk > 1:
            steps.append(Lens([chunk, *[1] * decodes], [max(chunk, keys), *[keys] * decodes]))
    return steps


@torch.inference_mode()
def measure(
    adapters: Mapping[str, Adapter],
    needs: AttentionNeeds,
    bounds: StepBounds,
    device: torch.device,
    *,
    time: Timer,
    pool_bytes: int = POOL_BYTES,
) -> AttentionTable:
    """Time every step of `steps_to_measure` with Pagoda's kernels and with each adapter. Raises what these raise."""
    rows: dict[StepShape, dict[str, float]] = {}
    for lens in steps_to_measure(bounds):
        batch = Batch(lens, needs, device, pool_bytes)
        everyone: dict[str, Adapter | None] = {OURS: None, **adapters}
        rows[batch.shape] = {name: time(partial(batch.attend, one)) for name, one in everyone.items()}
    return AttentionTable(rows)


def time_on_device(run: Callable[[], object]) -> float:
    """Median seconds between events of the current CUDA stream, after two calls that compile and warm up.

    If the host is slower than the device, this is the host's time, as for a step that nothing overlaps.
    """
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(ROUNDS):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch: its constructor has no types
            for _ in range(2)
        )
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(seconds))
