"""EngineStream: the client's state of one open request: the token log of each sequence, and the waiting reader.

Rule of token offsets: a sequence accepts exactly its next offset, ignores tokens that it has, and reports a gap. Knows
no gRPC.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagoda_common.errors import Code, DeadlineExceeded, PagodaError, RequestFailed
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import Embedding, EngineOutput, FinishReason, HypothesisLogprobs, TokenLogprobs
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams

MAX_RESUBMITS_WITHOUT_PROGRESS = 8
TRANSIENT = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
PATIENCE_S = 30.0
"""A request that no scheduler has accepted yet waits this long for one."""


@dataclass(frozen=True, slots=True)
class Known:
    """The part of a sequence that a client already has."""

    num_tokens: int
    is_finished: bool = False
    """It knows the end as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedSequence:
    """The engine's state of a sequence when its frontend was lost."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None while it had not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedRequest:
    """An orphaned request that another frontend can resume."""

    request_id: str
    attempt: int
    prompt_token_ids: list[int]
    seed: int
    arrival_time_ns: int
    timeout_s: float
    """Remaining time limit when it was last submitted; 0: none."""
    sequences: list[AdoptedSequence]
    note: bytes
    """`EngineRequest.note`."""
    tenant: str = ""
    """Its owner."""
    lora: LoraAdapter | None = None
    """The adapter that it was computed with."""


@dataclass(kw_only=True, slots=True)
class EngineRequest:
    """A prompt in token ids, and how to continue it."""

    request_id: str
    """Unique among the client's open requests."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    """End tokens; empty takes the model's."""
    priority: int = 0
    """Lower runs first (policy priority)."""
    cache_salt: str = ""
    """Requests share cached prefixes only with an equal salt."""
    timeout_s: float = 0.0
    """Seconds after which the request is aborted; 0 is never."""
    tenant: str = ""
    """Owner of the request: policy fair divides time between tenants."""
    resume_key: str = ""
    """Name under which another client may adopt the request when this one is gone; empty: no one may."""
    note: bytes = b""
    """For the adopter."""
    adopted: AdoptedRequest | None = None
    """The request resumes."""
    known: tuple[Known, ...] = ()
    """With `adopted`: what the client has of each sequence."""
    beam_search: BeamSearchParams | None = None
    """Search instead of sampling: the sequences are the n best hypotheses."""
    pooling: PoolingParams | None = None
    """The prompt's embedding instead of tokens: the one sequence has it with its end."""
    traceparent: str = ""
    """W3C traceparent of the client's span; empty when it is not sampled."""
    group: str = ""
    """The call that has made this request beside others, which take turns with those of other calls; empty: it has made
    this one alone."""
    client: str = ""
    """The client whose share of the queue the request uses; empty: no particular one."""
    lora: LoraAdapter | None = None
    """The adapter to compute with; all of it, so that any scheduler can continue with the request."""


@dataclass(slots=True, eq=False)
class SequenceLog:
    """The known output of one sequence."""

    stream: "EngineStream"
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One per token that was not given out, when asked for."""
    num_delivered: int = 0
    """Tokens that `EngineStream.get` has given out."""
    num_cached_tokens: int | None = None
    """When it was first admitted; None before."""
    num_preemptions: int = 0
    queue_s: float | None = None
    """Seconds until it was first admitted."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: PagodaError | None = None
    hypothesis: HypothesisLogprobs | None = None
    """With the end of a beam search's result."""
    embedding: Embedding | None = None
    """With the end of a request with pooling."""
    is_waiting: bool = False
    """It has news that `get` has not given out."""
    is_closed: bool = False
    """Its end was given out, or the consumer ended it: nothing more will be."""

    @property
    def is_finished(self) -> bool:
        """Whether no more messages are expected from the engine."""
        return self.finish_reason is not None or self.is_closed

    def extend(self, offset: int, token_ids: Sequence[int], logprobs: list[TokenLogprobs] | None = None) -> bool:
        """Take the tokens from `offset` on; returns whether all of them are known now (False is a gap)."""
        num_known = len(self.token_ids)
        if self.is_finished or offset + len(token_ids) <= num_known:
            return True
        if offset > num_known:
            return False
        num_old = num_known - offset
        self.token_ids += token_ids[num_old:]
        if self.logprobs is not None:
            if logprobs is None or len(logprobs) != len(token_ids):
                self.finish("error", error=RequestFailed("the engine sent tokens without the logprobs asked for"))
            else:
                self.logprobs += logprobs[num_old:]
        self.stream.wake(self)
        return True

    def finish(
        self, reason: FinishReason, *, stop_token_id: int | None = None, error: PagodaError | None = None
    ) -> None:
        """The sequence has ended."""
        if self.is_finished:
            return
        self.finish_reason, self.stop_token_id, self.error = reason, stop_token_id, error
        self.stream.wake(self)

    def has_news(self, at_least: int) -> bool:
        """Whether there are so many new tokens, the first one or the end."""
        num_delivered = self.num_delivered
        is_due = num_delivered == 0 or len(self.token_ids) - num_delivered >= at_least
        return is_due or self.finish_reason is not None

    def take(self) -> EngineOutput:
        """The new part since the last call; an error follows after the tokens."""
        start, reason = self.num_delivered, self.finish_reason
        self.num_delivered = len(self.token_ids)
        self.is_waiting = False
        has_tokens = start < self.num_delivered and self.stream.request.pooling is None
        if reason == "error" and has_tokens:  # by itself: the code that raises it drops what comes with it
            reason = None
            self.stream.wake(self)
        self.is_closed = reason is not None
        logprobs = self.logprobs
        if logprobs is not None:
            self.logprobs = []
        return EngineOutput(
            index=self.index,
            offset=start,
            token_ids=self.token_ids[start:],
            logprobs=logprobs,
            finish_reason=reason,
            stop_token_id=self.stop_token_id,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=self.num_preemptions,
            queue_s=self.queue_s,
            error=self.error if reason is not None else None,
            hypothesis=self.hypothesis,
            embedding=self.embedding,
        )


class EngineStream:
    """The outputs of one request. One consumer at a time."""

    def __init__(
        self,
        *,
        request: EngineRequest,
        on_stop: Callable[["EngineStream", int], None],
        on_abort: Callable[["EngineStream"], None],
    ) -> None:
        """`on_stop` and `on_abort` tell the engine; they are called at most once a sequence and once a request."""
        self.request = request
        with_logprobs = request.sampling_params.logprobs is not None
        self.sequences = [
            SequenceLog(self, index, logprobs=[] if with_logprobs else None)
            for index in range(request.sampling_params.n)
        ]
        has_prompt_logprobs = request.sampling_params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] * len(request.prompt_token_ids) if has_prompt_logprobs else None
        )
        """One per prompt token when asked for, None for the first; filled before the first output token."""
        self.attempt = 0
        """Times the request was submitted."""
        self.arrival_time_ns = time.time_ns()
        """Unix time at which it was made."""
        self._made_s = time.monotonic()
        self._deadline = self._made_s + request.timeout_s if request.timeout_s > 0 else None
        self._num_tokens_at_resubmit = -1
        self._num_resubmits = 0
        self._on_stop = on_stop
        self._on_abort = on_abort
        self._news: list[SequenceLog] = []
        self._error: PagodaError | None = None
        self._has_raised = False
        self._waiter: asyncio.Future[None] | None = None
        self._at_least = 1
        """New tokens for which it is woken."""
        if request.adopted is not None:
            self._take_over(request.adopted)

    def _take_over(self, adopted: AdoptedRequest) -> None:
        """Begin with what is known; all of it is news to the consumer."""
        self.attempt = adopted.attempt
        self.arrival_time_ns = adopted.arrival_time_ns
        for log, known in zip(self.sequences, adopted.sequences, strict=True):
            log.token_ids = list(known.token_ids)
            log.finish_reason, log.stop_token_id = known.finish_reason, known.stop_token_id
            log.num_cached_tokens = known.num_cached_tokens
            if log.token_ids or log.is_finished:
                log.is_waiting = True
                self._news.append(log)

    @property
    def is_finished(self) -> bool:
        """Every sequence's end was given out, or `get` has raised why there is none."""
        if self._has_raised:
            return True
        for sequence in self.sequences:  # noqa: SIM110 (asked for every token: a generator costs as much as the rest)
            if not sequence.is_closed:
                return False
        return True

    @property
    def is_done(self) -> bool:
        """Whether no more messages are expected from the engine."""
        return self._error is not None or all(sequence.is_finished for sequence in self.sequences)

    async def get(self, *, at_least: int = 1) -> list[EngineOutput]:
        """All that is waiting, at least one output; empty only when the stream is finished.

        Args:
            at_least: new tokens of a sequence that are worth waking up for, when nothing waits yet; its first token
                and its end always are.

        Raises:
            PagodaError: the request was rejected.
        """
        self._at_least = at_least
        while True:
            news, self._news = self._news, []
            outputs = [sequence.take() for sequence in news if not sequence.is_closed]
            if outputs:
                return outputs
            if self._error is not None:
                self._has_raised = True
                raise self._error
            if self.is_finished:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def stop(self, index: int) -> None:
        """The consumer saw a stop string: end that sequence, and drop what still comes for it."""
        sequence = self.sequences[index]
        if sequence.is_closed:
            return
        is_running = sequence.finish_reason is None
        sequence.is_closed = True
        if is_running:
            self._on_stop(self, index)
        self._wake_waiter()

    def abort(self) -> None:
        """End all sequences now; the consumer gets what was waiting, with finish_reason "abort"."""
        if self.is_done:
            return
        for sequence in self.sequences:
            sequence.finish("abort")
        self._on_abort(self)

    def drop(self) -> None:
        """The consumer has what it wants: free the log probabilities now. Stream and sequences refer to each other, so
        that otherwise only a garbage collection would."""
        self.prompt_logprobs = None
        for sequence in self.sequences:
            sequence.logprobs = None
        self._news = []

    def fail(self, error: PagodaError) -> None:
        """The request was not accepted."""
        if not self.is_done:
            self._error = error
            self._wake_waiter()

    def expire(self) -> None:
        """Its time limit is over: the consumer gets what was waiting, then DeadlineExceeded."""
        if self.is_done:
            return
        self.fail(self.overdue_error())
        self._on_abort(self)

    def overdue_error(self) -> DeadlineExceeded:
        """Its time limit is over."""
        return DeadlineExceeded(f"the request was not finished within {self.request.timeout_s:g} s")

    @property
    def remaining_s(self) -> float:
        """Seconds until the request's own time limit; 0 when it has none."""
        return 0.0 if self._deadline is None else max(0.001, self._deadline - time.monotonic())

    @property
    def is_overdue(self) -> bool:
        """Its time limit is over."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def can_retry(self, error: PagodaError) -> bool:
        """Whether a rejection should stay hidden: the request was accepted once and continues after a loss, or it came
        to a scheduler that is on its way out, and is for the next one."""
        is_early = error.code is Code.UNAVAILABLE and time.monotonic() < self._made_s + PATIENCE_S
        return is_early or (self.attempt > 1 and error.code in TRANSIENT)

    def count_resubmit(self) -> bool:
        """Note that a gap makes a new attempt necessary; False when that has helped nothing too often."""
        num_tokens = sum(len(sequence.token_ids) for sequence in self.sequences)
        if num_tokens > self._num_tokens_at_resubmit:
            self._num_tokens_at_resubmit, self._num_resubmits = num_tokens, 0
        self._num_resubmits += 1
        return self._num_resubmits <= MAX_RESUBMITS_WITHOUT_PROGRESS

    def wake(self, sequence: SequenceLog) -> None:
        """`sequence` has news."""
        if not sequence.is_waiting:
            sequence.is_waiting = True
            self._news.append(sequence)
        if self._waiter is not None and (self._at_least == 1 or sequence.has_news(self._at_least)):
            self._wake_waiter()

    def _wake_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
