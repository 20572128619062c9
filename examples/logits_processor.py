"""A logits processor: sequences that request it get only one token.

    pagoda serve --logits-processors examples.logits_processor:OnlyThisToken
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
      -d '{"model": "pagoda-tiny", "prompt": "Hello", "vllm_xargs": {"only_token_id": 77}}'

The module must be importable in the worker. An installed package needs no flag: it names the class as an entry point
of the group `pagoda.logits_processors`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.sampling.logits_processors import LogitsProcessor
from pagoda_worker.sampling.logits_state import LogitsBatch

NAME = "only_token_id"


class OnlyThisToken(LogitsProcessor):
    """Masks every token but the one that `only_token_id` names."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size=vocab_size, device=device)
        self._token_of: dict[int, int] = {}

    def is_needed(self, params: SamplingParams) -> bool:
        return NAME in (params.extra_args or {})

    def validate_params(self, params: SamplingParams) -> None:
        token_id = (params.extra_args or {})[NAME]
        if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
            raise ValueError(f"{NAME} must be a token id below {self.vocab_size}, got {token_id!r}")

    def update_state(self, *, added: Mapping[int, SamplingParams], removed: Sequence[int]) -> None:
        for slot in removed:
            self._token_of.pop(slot, None)
        for slot, params in added.items():
            self._token_of[slot] = (params.extra_args or {})[NAME]

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        chosen = torch.tensor([[self._token_of[slot]] for slot in batch.slots.tolist()], device=logits.device)
        kept = logits.gather(1, chosen)
        return torch.full_like(logits, -torch.inf).scatter_(1, chosen, kept)
