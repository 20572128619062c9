"""Results of requests: the engine's outputs in tokens, and users' outputs in text."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda_common.errors import PagodaError

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
Embedding: TypeAlias = npt.NDArray[np.float32]


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities at one output position, raw (before temperature and filters), natural logarithm."""

    token_ids: Sequence[int]
    """The sampled token first, then the top ones by falling probability. From the engine, this is an array."""
    logprobs: Sequence[float]
    """One per token id, float32. From the engine, this is an array."""
    sampled_rank: int
    """Rank of the sampled token in the vocabulary; 1 is the likeliest."""


@dataclass(frozen=True, slots=True)
class HypothesisLogprobs:
    """How a beam search found one of its results; natural logarithm."""

    cumulative_logprob: float
    """Sum over all tokens; divided by the length to the power of length_penalty it is the score."""
    logprobs: list[float]
    """One per output token."""
    ranks: list[int]
    """One per output token: its rank in the vocabulary, 1 is the likeliest."""


@dataclass(slots=True)
class EngineOutput:
    """New tokens of one sequence, as they come out of the engine."""

    index: int
    """Sequence within the request, 0 to n - 1."""
    offset: int
    """Place of the first new token in the sequence's output."""
    token_ids: list[int]
    """New tokens; empty when only the end is reported."""
    logprobs: list[TokenLogprobs] | None = None
    """One per new token when asked for."""
    finish_reason: FinishReason | None = None
    """Set when the sequence has ended."""
    stop_token_id: int | None = None
    """The stop token that ended it; None for an end-of-sequence token."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    queue_s: float | None = None
    """Seconds the sequence waited for its first place in a batch; None while it waits."""
    num_preemptions: int = 0
    """How often it was preempted; known when it has ended."""
    error: PagodaError | None = None
    """Set when finish_reason is error."""
    hypothesis: HypothesisLogprobs | None = None
    """With the end of a beam search's result."""
    embedding: Embedding | None = None
    """With the end of a request with pooling."""


@dataclass(slots=True)
class Logprob:
    """Log probability of one token at one position (vLLM's shape)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One finished sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string; None for an end-of-sequence token."""

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """When what happened to a request, as its client saw it (vLLM's shape)."""

    arrival_time: float = 0.0
    """Seconds since 1970."""
    queued_ts: float = 0.0
    """On the clock of time.monotonic(), as the following ones; 0 is not yet."""
    scheduled_ts: float = 0.0
    """First place in a batch."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """Seconds from arrival to the first token."""
    num_generation_tokens: int = 0
    """Over all sequences."""

    def add(self, delta: "SequenceDelta") -> None:
        """Count what is new."""
        if delta.queue_s is not None and not self.scheduled_ts:
            self.scheduled_ts = self.queued_ts + delta.queue_s
        if delta.token_ids:
            self.last_token_ts = time.monotonic()
            self.num_generation_tokens += len(delta.token_ids)
            if not self.first_token_ts:
                self.first_token_ts = self.last_token_ts
                self.first_token_latency = self.first_token_ts - self.queued_ts

    def copy(self) -> "RequestStateStats":
        """A copy; dataclasses.replace takes six times as long, for every token."""
        return RequestStateStats(
            self.arrival_time,
            self.queued_ts,
            self.scheduled_ts,
            self.first_token_ts,
            self.last_token_ts,
            self.first_token_latency,
            self.num_generation_tokens,
        )


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestStateStats | None = None


@dataclass(slots=True)
class SequenceDelta:
    """The new text of one sequence: the unit that HTTP and gRPC streams send."""

    index: int
    text: str
    """New text; stop strings are cut away, and nothing is given out that may still become one."""
    token_ids: list[int]
    offset: int
    """Place of the first new token in the sequence's output."""
    logprobs: list[TokenLogprobs] | None = None
    token_text_offsets: list[int] = field(default_factory=list)
    """For each new token: characters of the sequence's text before it (for logprobs.text_offset)."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0
    """Output tokens so far."""
    num_cached_tokens: int = 0
    queue_s: float | None = None
    """Seconds the sequence waited for its first place in a batch; None while it waits."""
    num_preemptions: int = 0
    is_replayed: bool = False
    """The client has it already: it was lost with another frontend, and matters only for what follows."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Of the prompt, if requested: one per token, None for the first; complete before the first output token."""
    hypothesis: HypothesisLogprobs | None = None
    """With the end of a beam search's result."""
    embedding: Embedding | None = None
    """With the end of a request with pooling."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read in it."""
        return not self.text
