"""Sampler: logits to tokens, a pure function of (logits, sampling params, token log, seed, offset). No loop over rows.

Order: masks and biases, penalties, temperature, min-p, top-k, top-p; then a race among what is left, with one random
number for each (seed, offset, token). So neither the batch nor a restart changes what is sampled.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda_kernels.philox import philox_keys
from pagoda_kernels.sample_tokens import sample_tokens
from pagoda_worker.batch import IntArray, TokenArray
from pagoda_worker.logits_rules import apply_masks, apply_penalties
from pagoda_worker.sampling_columns import SamplingColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOutput:
    """One token a row."""

    token_ids: IntArray
    """[n]; 0 where the row is bad."""
    is_bad: npt.NDArray[np.bool_]
    """[n] the row has a NaN or infinite logit, or no token is left to sample."""


class Sampler:
    """Samples for the rows of a batch; holds nothing but the columns it reads."""

    def __init__(self, *, columns: SamplingColumns) -> None:
        self._columns = columns

    def sample(
        self,
        logits: Tensor,
        slots: IntArray,
        *,
        tokens: TokenArray,
        num_prompt_tokens: IntArray,
        num_tokens: IntArray,
    ) -> SamplerOutput:
        """One token for each row.

        Args:
            logits: [n, vocab_size] float32; not changed.
            slots: [n].
            tokens: [slots, tokens] the token log.
            num_prompt_tokens, num_tokens: [n] of each row; their difference is the new token's offset.
        """
        columns = self._columns
        offsets = num_tokens - num_prompt_tokens
        if columns.has_masks[slots].any():
            logits = apply_masks(logits.clone(), columns, slots, tokens, num_prompt_tokens, num_tokens)
        if columns.has_penalties[slots].any():
            logits = apply_penalties(logits.clone(), columns, slots, tokens, num_prompt_tokens, num_tokens)
        top = logits.amax(dim=-1)  # NaN where some logit is
        is_good = torch.isfinite(top)
        if not bool(is_good.all()):
            logits = logits.masked_fill(~is_good[:, None], 0.0)
        temperature = columns.temperature[slots]
        is_random = temperature > 0
        if not is_random.any():
            sampled = logits.argmax(dim=-1)
        else:
            random_rows = np.flatnonzero(is_random)
            drawn = self._draw(logits, random_rows, slots[random_rows], offsets[random_rows])
            if random_rows.size == slots.size:
                sampled = drawn
            else:
                sampled = logits.argmax(dim=-1)
                sampled[torch.from_numpy(random_rows).to(logits.device)] = drawn
        is_bad = ~is_good.cpu().numpy()
        token_ids: IntArray = sampled.cpu().numpy()
        return SamplerOutput(token_ids=np.where(is_bad, 0, token_ids), is_bad=is_bad)

    def _draw(self, logits: Tensor, rows: IntArray, slots: IntArray, offsets: IntArray) -> Tensor:
        columns, device = self._columns, logits.device
        if rows.size != logits.shape[0]:
            logits = logits[torch.from_numpy(rows).to(device)]
        keys = philox_keys(columns.seed[slots], offsets.astype(np.uint64))

        def column(values: npt.NDArray[np.generic], is_on: npt.NDArray[np.bool_]) -> Tensor | None:
            return torch.from_numpy(values).to(device) if is_on.any() else None

        top_k, top_p, min_p = columns.top_k[slots], columns.top_p[slots], columns.min_p[slots]
        return sample_tokens(
            logits / torch.from_numpy(columns.temperature[slots]).to(device)[:, None],
            torch.from_numpy(keys).to(device),
            top_k=column(top_k, top_k > 0),
            top_p=column(top_p, top_p < 1),
            min_p=column(min_p, min_p > 0),
        )
