"""Builds RequestOutputs, vLLM's shape, from the text deltas of one request."""

import json
import time
from dataclasses import dataclass, field

from pagoda.llm.prompts import Prompt
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import (
    CompletionOutput,
    FinishReason,
    HypothesisLogprobs,
    Logprob,
    RequestOutput,
    RequestStateStats,
    SequenceDelta,
    TokenLogprobs,
)
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagoda_common.text.tokenizer import Tokenizer

GENERATION_CONFIG_NAMES = {
    row.generation_config: row.name for row in SAMPLING_FIELDS.values() if row.generation_config is not None
}
"""Fields of generation_config.json and what SamplingParams calls them, as in vLLM."""


def default_sampling_params(generation_config_json: str) -> SamplingParams:
    """SamplingParams as the checkpoint recommends them; values that are no valid parameters are left out."""
    config = json.loads(generation_config_json) if generation_config_json else {}
    params = {}
    for theirs, ours in GENERATION_CONFIG_NAMES.items():
        if config.get(theirs) is not None:
            try:
                SamplingParams(**{ours: config[theirs]})
            except InvalidRequest:
                continue
            params[ours] = config[theirs]
    return SamplingParams(**params)


def logprobs_by_token(
    entry: TokenLogprobs, tokenizer: Tokenizer | None, *, are_ranked: bool = True
) -> dict[int, Logprob]:
    """vLLM's shape: the sampled token, then the likeliest ones; chosen ones are not `are_ranked`: they have no rank.

    Without a tokenizer no token has a text."""
    result: dict[int, Logprob] = {}
    for place, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id not in result:
            rank = entry.sampled_rank if place == 0 else place if are_ranked else None
            result[token_id] = Logprob(logprob=logprob, rank=rank, decoded_token=_text(token_id, tokenizer))
    return result


def _text(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token_id)


@dataclass(slots=True)
class _Sequence:
    parts: list[str] = field(default_factory=list)
    """The parts of its text."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def text(self) -> str:
        """All of it; put together once."""
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


class RequestOutputBuilder:
    """All that one request has given so far."""

    def __init__(self, *, request: EngineRequest, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.request = request
        self._prompt = prompt
        self._tokenizer = tokenizer if request.sampling_params.detokenize else None
        self._are_chosen = bool(request.sampling_params.logprob_token_ids)
        self._with_logprobs = (
            request.sampling_params.logprobs is not None or self._are_chosen or request.beam_search is not None
        )
        self._sequences = [_Sequence() for _ in range(request.sampling_params.n)]
        self._num_cached_tokens = 0
        self._metrics = RequestStateStats(arrival_time=time.time(), queued_ts=time.monotonic())
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences."""
        return self._metrics.num_generation_tokens

    def append(self, deltas: list[SequenceDelta]) -> None:
        """Take the news of some sequences."""
        for delta in deltas:
            sequence = self._sequences[delta.index]
            sequence.parts.append(delta.text)
            sequence.token_ids += delta.token_ids
            for entry in delta.logprobs or ():
                shaped = logprobs_by_token(entry, self._tokenizer, are_ranked=not self._are_chosen)
                sequence.logprobs.append(shaped)
                sequence.cumulative_logprob += entry.logprobs[0]
            if delta.hypothesis is not None:
                self._take_hypothesis(sequence, delta.hypothesis)
            sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason
            self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
            self._metrics.add(delta)

    def _take_hypothesis(self, sequence: _Sequence, hypothesis: HypothesisLogprobs) -> None:
        sequence.cumulative_logprob = hypothesis.cumulative_logprob
        rows = zip(sequence.token_ids, hypothesis.logprobs, hypothesis.ranks, strict=True)
        sequence.logprobs = [
            {token_id: Logprob(logprob=logprob, rank=rank, decoded_token=_text(token_id, self._tokenizer))}
            for token_id, logprob, rank in rows
        ]

    def fail(self) -> None:
        """The engine could not finish the request: what has not ended ends as an error."""
        for sequence in self._sequences:
            sequence.finish_reason = sequence.finish_reason or "error"

    def build(self) -> RequestOutput:
        """A snapshot that later deltas do not change."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[self._completion(index, sequence) for index, sequence in enumerate(self._sequences)],
            finished=None not in [sequence.finish_reason for sequence in self._sequences],
            prompt_logprobs=self._prompt_logprobs(),
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics.copy(),
        )

    def take(self) -> RequestOutput:
        """The new part since the last call, in the shape of `build` (output_kind DELTA); it is then dropped."""
        output = self.build()
        for sequence in self._sequences:
            sequence.parts, sequence.token_ids, sequence.logprobs = [], [], []
        return output

    def _completion(self, index: int, sequence: _Sequence) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=sequence.text(),
            token_ids=list(sequence.token_ids),
            cumulative_logprob=sequence.cumulative_logprob if self._with_logprobs else None,
            logprobs=list(sequence.logprobs) if self._with_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.prompt_logprobs is None:
            return None
        return [None if entry is None else logprobs_by_token(entry, self._tokenizer) for entry in self.prompt_logprobs]
