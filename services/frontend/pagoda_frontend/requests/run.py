"""Run: executes one API call with one engine request per prompt, merges their streams, and counts usage."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from pagoda_common.engine.generation import TextStream
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.outputs import Embedding, FinishReason, HypothesisLogprobs, SequenceDelta, TokenLogprobs
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import MAX_N, SamplingParams
from pagoda_common.process.logging import request_id as log_request_id
from pagoda_frontend.budget.caller import admit_hold, caller, hold_more
from pagoda_frontend.observability.request_span import start_request_span
from pagoda_frontend.requests.call_context import CallContext
from pagoda_frontend.requests.event_ids import MAX_SEQUENCES, Delivered, EventIds
from pagoda_frontend.requests.params import check_output_logprobs, check_prompt_logprobs, fit_to_context
from pagoda_frontend.requests.resume import Resumption
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import Serving

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ENTRY_BYTES = 32
"""Bytes of a token or a log probability in an answer."""
POSITION_BYTES = 256
"""Bytes of memory of the log probabilities at one position, in addition to its entries."""
HELD_ENTRY_BYTES = 8
"""Bytes of memory of one entry."""
OUTPUT_TOKEN_BYTES = 100
"""Bytes of memory of an output token: its id, and its text as a separate string."""
LARGE_CALL = 16
"""Number of sequences up to which a call is small: all of them run at once."""
STARTED_IN_A_TURN = 16
"""Number of prompts that are submitted between two turns of the loop: each takes some tenths of a millisecond."""
MAX_ARRIVED = 64
"""Maximum number of outputs that wait for the client; further text is not made before there is room."""


@dataclass(slots=True)
class CollectedSequence:
    """A sequence and its output so far."""

    index: int
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_text_offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    hypothesis: HypothesisLogprobs | None = None
    """Log probabilities of a beam search's result."""
    embedding: Embedding | None = None
    """Set for pooling requests."""

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self.parts)

    def add(self, delta: SequenceDelta) -> None:
        """Add a delta."""
        self.parts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.token_text_offsets += delta.token_text_offsets
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_output_tokens = delta.num_output_tokens
        self.prompt_logprobs = delta.prompt_logprobs
        self.hypothesis = delta.hypothesis
        self.embedding = delta.embedding
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)


class Kept(Protocol):
    """A new part of a sequence or of a message."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def logprobs(self) -> list[TokenLogprobs] | None: ...


def hold_kept(delta: Kept, *, num_sequences: int) -> None:
    """Count the memory that `delta` takes until its call is over: log probabilities, and the tokens of a large call.
    Those of a small call are bounded by the number of sequences that run at a time.

    Raises:
        QueueFull: requests and answers hold too much memory.
    """
    num_bytes = OUTPUT_TOKEN_BYTES * len(delta.token_ids) if num_sequences > LARGE_CALL else 0
    if delta.logprobs:
        num_bytes += sum(POSITION_BYTES + HELD_ENTRY_BYTES * len(one.token_ids) for one in delta.logprobs)
    hold_more(num_bytes)


class Run:
    """The engine requests of one API call. Sequence `i` of prompt `p` has index p * n + i."""

    def __init__(
        self,
        call: CallContext,
        *,
        serving: Serving,
        model: ServedModel,
        prompts: Sequence[list[int]],
        sampling_params: Sequence[SamplingParams],
        cache_salt: str = "",
        beam_search: BeamSearchParams | None = None,
        pooling: PoolingParams | Sequence[PoolingParams] | None = None,
        is_scoring: bool = False,
    ) -> None:
        """
        Args:
            sampling_params: one per prompt, all with the same n.
            pooling: pool the prompts instead of continuing them; one value for all, or one per prompt; n is 1 then.
            is_scoring: generated tokens are not returned.
        """
        if pooling is None and model.only_pools:
            text = f"the model does not generate text: it can {', '.join(model.pooling_tasks)}"
            raise InvalidRequest(text, field="model")
        self.call = call
        self.model = model
        self.prompts = prompts
        self.n = sampling_params[0].n
        self._num_output_tokens = [0] * (len(prompts) * self.n)
        self._num_cached_tokens = [0] * len(prompts)
        self._is_scoring = is_scoring
        self.prompt_logprobs: list[list[TokenLogprobs | None] | None] = [None] * len(prompts)
        """For each prompt, if requested; set before its first output token."""
        self._serving = serving
        poolings = pooling if isinstance(pooling, Sequence) else [pooling] * len(prompts)
        self._requests = [
            EngineRequest(
                request_id=call.engine_id if len(prompts) == 1 else f"{call.engine_id}-{number}",
                prompt_token_ids=prompt,
                sampling_params=params,
                priority=call.priority,
                cache_salt=serving.cache_salt(cache_salt, tenant=call.tenant),
                timeout_s=call.timeout_s,
                tenant=call.tenant,
                group=call.engine_id if len(prompts) > 1 else "",
                client=caller.get(),
                beam_search=beam_search,
                pooling=one,
                lora=model.lora,
            )
            for number, (prompt, params, one) in enumerate(zip(prompts, sampling_params, poolings, strict=True))
        ]
        self.event_ids: EventIds | None = None
        """Event ids of a stream that can be resumed; None too if it has more than MAX_SEQUENCES."""
        if call.note and self.num_sequences <= MAX_SEQUENCES:
            for request in self._requests:
                request.resume_key = call.request_id
            self._requests[0].note = call.note
            self.event_ids = EventIds(response_id=call.request_id, n=self.num_sequences)
        if call.resumption is not None:
            self._resume(call.resumption)
        self.num_prompt_tokens = sum(len(request.prompt_token_ids) for request in self._requests)

    def _resume(self, resumption: Resumption) -> None:
        known = resumption.place.known
        for place, adopted in enumerate(resumption.adopted):
            request = self._requests[place]
            self._requests[place] = replace(
                request,
                request_id=adopted.request_id,
                prompt_token_ids=adopted.prompt_token_ids,
                sampling_params=request.sampling_params.with_changes(seed=adopted.seed),
                timeout_s=adopted.timeout_s,
                lora=adopted.lora,
                adopted=adopted,
                known=known[place * self.n : (place + 1) * self.n],
            )

    def note_place(self, delta: Delivered) -> None:
        """Note that the next event with an id carries `delta`."""
        if self.event_ids is not None:
            self.event_ids.advance(delta)

    def release(self) -> None:
        """The client has everything, or is gone: the stream will not be resumed."""
        if self.event_ids is not None:
            for request in self._requests:
                self._serving.engine.release(request.request_id)

    @property
    def num_sequences(self) -> int:
        """Number of prompt tokens, over all prompts."""
        return len(self._num_output_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far, over all sequences."""
        return sum(self._num_output_tokens)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, over all prompts."""
        return sum(self._num_cached_tokens)

    @property
    def answer_bytes(self) -> int:
        """Approximate bytes of an answer with all outputs."""
        params = self._requests[0].sampling_params
        num_each = 1 + max(0, params.logprobs or 0)
        num_entries = self.num_output_tokens * num_each
        for positions in self.prompt_logprobs:
            if positions:
                longest = next((one for one in reversed(positions) if one is not None), None)
                num_entries += len(positions) * (1 if longest is None else len(longest.token_ids))
        return ENTRY_BYTES * num_entries

    async def on_thread(self, work: Callable[[], Result], *, num_bytes: int) -> Result:
        """The result of `work`, on a thread unless `num_bytes` is small; raises what `work` raises, and QueueFull."""
        return await self._serving.work.run_sized(work, num_bytes=num_bytes)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, as of now."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }
        if self._serving.config.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        return usage

    async def deltas(self) -> AsyncGenerator[list[SequenceDelta]]:
        """New output as it comes. Closing the iterator aborts unfinished requests.

        Raises:
            QueueFull: the log probabilities of all open requests take too much memory.
            PagodaError: a prompt was refused or failed; the others are aborted.
        """
        num_each = self._requests[0].sampling_params.prompt_logprobs
        if num_each is not None:
            num_each = 1 + (self.model.vocab_size if num_each == -1 else num_each)
            hold_more(self.num_prompt_tokens * (POSITION_BYTES + HELD_ENTRY_BYTES * num_each))
        source = self._generate(self._requests[0]) if len(self._requests) == 1 else self._merged()
        engine_ids = [request.request_id for request in self._requests]
        call = self.call
        followed = self._serving.request_log.follow(
            call.request_id,
            tenant=call.tenant,
            num_prompt_tokens=self.num_prompt_tokens,
            num_sequences=self.num_sequences,
        )
        with self._serving.open_request(call.request_id, engine_ids, tenant=call.tenant), followed as logged:
            async with aclosing(source):
                async for deltas in source:
                    for delta in deltas:
                        if delta.prompt_logprobs is not None:
                            self.prompt_logprobs[delta.index // self.n] = delta.prompt_logprobs
                        if self._is_scoring:
                            _drop_output(delta)
                        self._num_output_tokens[delta.index] = delta.num_output_tokens
                        if delta.num_cached_tokens:
                            self._num_cached_tokens[delta.index // self.n] = delta.num_cached_tokens
                    logged.add(deltas, num_output_tokens=self.num_output_tokens)
                    yield deltas

    async def collect(self) -> list[CollectedSequence]:
        """Every sequence, whole, in order of index; raises as `deltas`."""
        sequences = [CollectedSequence(index) for index in range(self.num_sequences)]
        async with aclosing(self.deltas()) as stream:
            async for deltas in stream:
                for delta in deltas:
                    hold_kept(delta, num_sequences=self.num_sequences)
                    if delta.embedding is not None:
                        hold_more(delta.embedding.nbytes)
                    sequences[delta.index].add(delta)
        return sequences

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[list[SequenceDelta]]:
        """One request's output as it comes, recorded in metrics and span. Closing the iterator aborts the request."""
        serving, model, params = self._serving, self.model, request.sampling_params
        if not log_request_id.get():
            log_request_id.set(request.request_id)
        if serving.config.enable_log_requests:
            self._log(request)
        timer = serving.metrics.timer(
            num_prompt_tokens=len(request.prompt_token_ids),
            n=params.n,
            max_tokens=params.max_tokens if request.pooling is None else None,
        )
        outcome, fault, is_whole = "abort", "", False
        span = None
        if serving.tracer is not None:
            span = start_request_span(request, tracer=serving.tracer, above=self.call.span, model_name=model.names[0])
        try:
            await serving.wait_for_recovery(request.timeout_s)
            stream = TextStream(engine=serving.engine, tokenizer=model.tokenizer, request=request)
            try:
                while not stream.is_finished:
                    if deltas := await stream.get():
                        timer.add(deltas)
                        if span is not None:
                            span.add(deltas)
                        yield deltas
            finally:
                is_whole = stream.is_finished
                stream.close()
        except PagodaError as error:
            outcome, fault = "error", error.message
            if error.code is Code.RESOURCE_EXHAUSTED:
                serving.metrics.count_rejection(error.message)
            raise
        finally:
            timer.close(outcome)
            if span is not None:
                span.close("finished" if is_whole and not fault else outcome, fault)

    def _log(self, request: EngineRequest) -> None:
        """Log the request as vLLM does: its prompt only at level debug."""
        num_tokens = len(request.prompt_token_ids)
        logger.info(
            "received request %s: %d prompt tokens, %r", request.request_id, num_tokens, request.sampling_params
        )
        if logger.isEnabledFor(logging.DEBUG):
            text = self.model.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            logger.debug("request %s has the prompt %r", request.request_id, text[: self._serving.config.max_log_len])

    async def _merged(self) -> AsyncGenerator[list[SequenceDelta]]:
        arrived: asyncio.Queue[list[SequenceDelta] | Exception | None] = asyncio.Queue(MAX_ARRIVED)

        async def feed(number: int, request: EngineRequest) -> None:
            try:
                async with aclosing(self._generate(request)) as stream:
                    async for deltas in stream:
                        for delta in deltas:
                            delta.index += number * self.n
                        await arrived.put(deltas)
                await arrived.put(None)
            except Exception as error:
                await arrived.put(error)

        tasks: list[asyncio.Task[None]] = []

        async def start() -> None:
            for number, request in enumerate(self._requests):
                tasks.append(asyncio.create_task(feed(number, request)))
                if len(tasks) % STARTED_IN_A_TURN == 0:
                    await asyncio.sleep(0)

        starter = asyncio.create_task(start())
        try:
            num_running = len(self._requests)
            while num_running:
                item = await arrived.get()
                if item is None:
                    num_running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in (starter, *tasks):
                task.cancel()
            await asyncio.gather(starter, *tasks, return_exceptions=True)


def _drop_output(delta: SequenceDelta) -> None:
    """Remove the one token that every request must generate."""
    delta.text, delta.token_ids, delta.token_text_offsets, delta.num_output_tokens = "", [], [], 0
    delta.logprobs = None if delta.logprobs is None else []
    delta.stop_reason = None
    if delta.finish_reason == "stop":
        delta.finish_reason = "length"


def start_run(
    call: CallContext,
    *,
    serving: Serving,
    model: ServedModel,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    field: str,
    cache_salt: str | None = None,
    beam_search: BeamSearchParams | None = None,
    is_scoring: bool = False,
) -> Run:
    """A run of `prompts`, which must fit the model's context; generation starts when the run is read.

    Args:
        field: the request's field that holds the prompts.
        is_scoring: return only the prompts' log probabilities.

    Raises:
        InvalidRequest: a prompt does not fit the context, or there are too many sequences or log probabilities.
    """
    if len(prompts) * params.n > MAX_N:
        raise InvalidRequest(f"n times prompts must be at most {MAX_N}, got {len(prompts) * params.n}", field="n")
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    admit_hold(num_prompt_tokens)
    check_prompt_logprobs(params, num_prompt_tokens=num_prompt_tokens, vocab_size=model.vocab_size)
    fitted = [
        fit_to_context(params, num_prompt_tokens=len(prompt), max_model_len=model.max_model_len, field=field)
        for prompt in prompts
    ]
    if beam_search is None:
        check_output_logprobs(fitted, vocab_size=model.vocab_size)
    return Run(
        call,
        serving=serving,
        model=model,
        prompts=prompts,
        sampling_params=fitted,
        cache_salt=cache_salt or "",
        beam_search=beam_search,
        is_scoring=is_scoring,
    )
