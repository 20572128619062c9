"""Sampler: logits to tokens, a pure function of (logits, sampling params, token log, seed, offset). No loop over rows.

Order: logits processors, structured outputs, masks and biases, penalties, temperature, min-p, top-k, top-p; then a
random choice among the remaining tokens, with one random number for each (seed, offset, token). So neither the batch
nor a restart changes the sampled token.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda_common.params.sampling_params import SAMPLING_FIELDS
from pagoda_kernels.sampling.apply_token_bitmask import apply_token_bitmask
from pagoda_kernels.sampling.argmax import argmax
from pagoda_kernels.sampling.philox import philox_keys
from pagoda_kernels.sampling.sample_tokens import filter_logits, sample_tokens
from pagoda_worker.memory.transfers import to_device, to_host
from pagoda_worker.sampling.logits_processors import LogitsProcessors
from pagoda_worker.sampling.logits_rules import LogitsRules
from pagoda_worker.sampling.logits_state import LogitsBatch
from pagoda_worker.sampling.sampling_columns import SamplingColumns
from pagoda_worker.sampling.structured import TokenMask
from pagoda_worker.steps.step import IntArray

FILTERS = ("top_k", "top_p", "min_p")
"""Parameters that `sample_tokens` takes by name; a default value turns them off."""
BAD_TOKEN = -1
"""Token id of a row without a sample, sent from a device to its host and from rank 0 to other ranks."""
NO_TOKEN = -2
"""Marks a row with good logits whose parameters leave no token to sample; sent from a device to its host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOutput:
    """One token per row."""

    token_ids: IntArray
    """[n]; 0 where the row is bad."""
    is_bad: npt.NDArray[np.bool_]
    """[n] the row has a NaN or infinite logit, or no token is left to sample."""
    processed: Tensor | None = None
    """[n, vocab_size] the logits that were sampled from, -inf for excluded tokens; only if requested."""


class Sampler:
    """Samples tokens for the rows of a batch. Holds the parameter columns, and derived state on the device."""

    def __init__(
        self, *, columns: SamplingColumns, processors: LogitsProcessors | None = None, never_waits: bool = False
    ) -> None:
        """`never_waits`: make no decision by the logits' values, so that there is only one wait for an accelerator, at
        the end. The tokens are the same."""
        self._columns = columns
        self._processors = processors
        self._never_waits = never_waits
        self._rules: LogitsRules | None = None

    def sample(
        self,
        logits: Tensor,
        batch: LogitsBatch,
        *,
        likeliest: tuple[Tensor, Tensor] | None = None,
        token_mask: TokenMask | None = None,
        keep_processed: bool = False,
    ) -> SamplerOutput:
        """One token for each row.

        Args:
            logits: [n, vocab_size] float32; not changed.
            batch: the rows; a row's output tokens so far are the new token's offset.
            likeliest: `argmax` of `logits`, if known.
            token_mask: tokens that constrained rows may sample.
            keep_processed: also return the logits that were sampled from.
        """
        columns, slots = self._columns, batch.slots
        given = logits
        if self._processors is not None:
            logits = self._processors.apply(logits, batch)
        if token_mask is not None:
            logits = masked(logits, token_mask)
        logits = self._ruled(logits, batch)
        # NaN where some logit is.
        top, best = argmax(logits) if likeliest is None or logits is not given else likeliest
        random_rows = np.flatnonzero(columns.temperature[slots] > 0)
        if not (random_rows.size or keep_processed or self._never_waits):
            highest, token_ids = to_host(top, best)
            is_bad = ~np.isfinite(highest)
            return SamplerOutput(token_ids=np.where(is_bad, 0, token_ids), is_bad=is_bad)
        is_good = torch.isfinite(top)
        has_use = random_rows.size > 0 or keep_processed
        if has_use if self._never_waits else not bool(is_good.all()):
            logits = logits.masked_fill(~is_good[:, None], 0.0)
        sampled, processed = best, logits if keep_processed else None
        if random_rows.size:
            sampled, processed = self._race(logits, best, batch, random_rows, keep_processed=keep_processed)
        if self._never_waits:
            (token_ids,) = to_host(sampled.masked_fill(~is_good, BAD_TOKEN))
            is_bad = token_ids < 0
        else:
            is_bad = ~is_good.cpu().numpy()
            token_ids = sampled.cpu().numpy()
        return SamplerOutput(token_ids=np.where(is_bad, 0, token_ids), is_bad=is_bad, processed=processed)

    def launch(self, logits: Tensor, batch: LogitsBatch, *, likeliest: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The tokens of `sample` without waiting: [n] int64 on the device, BAD_TOKEN or NO_TOKEN in bad rows.

        Only for rows that do not need the log (`SamplingColumns.needs_log`).
        """
        ruled = self._ruled(logits, batch)
        top, best = argmax(ruled) if likeliest is None or ruled is not logits else likeliest
        is_good = torch.isfinite(top)
        random_rows = np.flatnonzero(self._columns.temperature[batch.slots] > 0)
        sampled = best
        if random_rows.size:
            sampled, _ = self._race(ruled.masked_fill(~is_good[:, None], 0.0), best, batch, random_rows)
        sampled = sampled.masked_fill(~is_good, BAD_TOKEN)
        if ruled is logits:
            return sampled
        # The logits may be gone when the host learns of a bad row, so the cause is determined now.
        return sampled.masked_fill(~is_good & torch.isfinite(argmax(logits)[0]), NO_TOKEN)

    def _ruled(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """The logits after the rules; unchanged without rules."""
        if not self._columns.has_rules[batch.slots].any():
            return logits
        if self._rules is None:
            self._rules = LogitsRules(columns=self._columns, vocab_size=logits.shape[1], device=logits.device)
        return self._rules.apply(logits, batch)

    def _race(
        self,
        logits: Tensor,
        best: Tensor,
        batch: LogitsBatch,
        random_rows: IntArray,
        *,
        keep_processed: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """[n] `best`, with drawn tokens in random rows; and the logits that were sampled from."""
        slots = batch.slots[random_rows]
        whole = random_rows.size == batch.slots.size
        place = to_device(random_rows, logits.device)
        some = logits if whole else logits[place]
        temperature = to_device(self._columns.temperature[slots], logits.device)
        filters = self._filters(slots, logits.device)
        drawn = self._draw(some, batch.rows(random_rows), temperature, filters)
        sampled = drawn if whole else best.index_copy(0, place, drawn)
        if not keep_processed:
            return sampled, None
        scaled = some / temperature[:, None]
        return sampled, logits.index_copy(0, place, filter_logits(scaled, **filters))

    def _filters(self, slots: IntArray, device: torch.device) -> dict[str, Tensor]:
        """The filters that are on in at least one row."""
        found = {name: (self._columns[name][slots], SAMPLING_FIELDS[name].default) for name in FILTERS}
        return {name: to_device(values, device) for name, (values, off) in found.items() if (values != off).any()}

    def _draw(self, logits: Tensor, batch: LogitsBatch, temperature: Tensor, filters: dict[str, Tensor]) -> Tensor:
        offsets = (batch.num_tokens - batch.num_prompt_tokens).astype(np.uint64)
        keys = to_device(philox_keys(self._columns.seed[batch.slots], offsets), logits.device)
        return sample_tokens(logits, keys, temperature=temperature, **filters)


def masked(logits: Tensor, mask: TokenMask) -> Tensor:
    """`logits` [n, vocab_size] with -inf where the mask forbids a token."""
    bits = to_device(mask.bits, logits.device)
    if mask.rows.size == logits.shape[0]:
        return apply_token_bitmask(logits, bits)
    rows = to_device(mask.rows, logits.device)
    return logits.index_copy(0, rows, apply_token_bitmask(logits[rows], bits))
