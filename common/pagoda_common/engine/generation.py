"""Generates text for whole requests: detokenizes, finds stop strings, and ends sequences at one. No HTTP, no gRPC.

Both the frontend and the client library turn an engine's tokens into text here, so both give the same text.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from pagoda_common.engine.interface import Engine
from pagoda_common.engine.stream import EngineRequest, EngineStream, Known
from pagoda_common.errors import RequestFailed
from pagoda_common.params.outputs import EngineOutput, SequenceDelta, TokenLogprobs
from pagoda_common.text.stop_strings import StopStrings
from pagoda_common.text.tokenizer import Tokenizer


class SequenceText:
    """The running text of one sequence."""

    def __init__(self, *, index: int, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        params = request.sampling_params
        self._index = index
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = tokenizer.detokenizer(
                request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        self._stop_strings: StopStrings | None = None
        if params.stop_strings and self._detokenizer is not None:
            self._stop_strings = StopStrings(params.stop_strings, include_in_output=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._includes_stop_token = params.include_stop_str_in_output
        self._num_tokens = 0
        self._num_characters = 0
        """Characters of all tokens so far, those held back or cut away included."""
        self.has_met_stop_string = False

    def append(self, output: EngineOutput) -> SequenceDelta:
        """Take an output of the engine. After a stop string, tokens and end that come with it are left out."""
        delta = SequenceDelta(
            index=self._index,
            text="",
            token_ids=output.token_ids,
            offset=output.offset,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_token_id,
            num_cached_tokens=output.num_cached_tokens,
            num_preemptions=output.num_preemptions,
            queue_s=output.queue_s,
            hypothesis=output.hypothesis,
            embedding=output.embedding,
        )
        # The token that ended the sequence is one of its tokens, but not of its text.
        is_stopped = output.finish_reason == "stop" and not self._includes_stop_token
        num_text_tokens = len(output.token_ids) - (1 if is_stopped and output.token_ids else 0)
        if self._detokenizer is None:
            self._num_tokens += len(output.token_ids)
        elif self._stop_strings is None and output.logprobs is None:
            delta.text = self._detokenizer.append(output.token_ids[:num_text_tokens])
            self._num_tokens += len(output.token_ids)
            self._num_characters += len(delta.text)
        else:
            self._append_one_by_one(delta, num_text_tokens)
        if output.finish_reason is not None and not self.has_met_stop_string:
            self._flush(delta)
        delta.num_output_tokens = self._num_tokens
        return delta

    def _append_one_by_one(self, delta: SequenceDelta, num_text_tokens: int) -> None:
        """As above where each token's place in the text counts."""
        assert self._detokenizer is not None
        parts: list[str] = []
        for place, token_id in enumerate(delta.token_ids):
            delta.token_text_offsets.append(self._num_characters)
            self._num_tokens += 1
            if place >= num_text_tokens:
                continue
            text = self._detokenizer.append([token_id])
            self._num_characters += len(text)
            if self._stop_strings is None or self._num_tokens <= self._min_tokens:
                parts.append(text)
            elif self._meets_stop_string(delta, parts, text):
                delta.token_ids = delta.token_ids[: place + 1]
                if delta.logprobs is not None:
                    delta.logprobs = delta.logprobs[: place + 1]
                break
        delta.text = "".join(parts)

    def _meets_stop_string(self, delta: SequenceDelta, parts: list[str], text: str) -> bool:
        assert self._stop_strings is not None
        result = self._stop_strings.append(text)
        parts.append(result.text)
        if result.stop_string is None:
            return False
        self.has_met_stop_string = True
        delta.finish_reason, delta.stop_reason = "stop", result.stop_string
        return True

    def _flush(self, delta: SequenceDelta) -> None:
        """The engine ended the sequence: give out what was held back."""
        if self._detokenizer is None:
            return
        text = self._detokenizer.flush()
        self._num_characters += len(text)
        if self._stop_strings is None:
            delta.text += text
            return
        parts = [delta.text]
        if not self._meets_stop_string(delta, parts, text):
            parts.append(self._stop_strings.flush())
        delta.text = "".join(parts)


class TextStream:
    """A submitted request whose outputs come as text. Its owner closes it, which aborts what has not ended."""

    def __init__(self, *, engine: Engine, tokenizer: Tokenizer | None, request: EngineRequest) -> None:
        """Submits the request.

        Raises:
            PagodaError: as `Engine.submit`.
        """
        self._stream: EngineStream = engine.submit(request)
        self._texts = [
            SequenceText(index=index, request=request, tokenizer=tokenizer)
            for index in range(request.sampling_params.n)
        ]
        self._has_stop_strings = bool(request.sampling_params.stop_strings)
        self._known = request.known
        self._deadline: asyncio.TimerHandle | None = None
        if request.timeout_s > 0:  # here as well as in the engine, which may be away or stuck
            self._deadline = asyncio.get_running_loop().call_later(request.timeout_s, self._stream.expire)

    @property
    def is_finished(self) -> bool:
        """Every sequence's end was given out."""
        return self._stream.is_finished

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One per prompt token when asked for, None for the first; there before the first output token."""
        return self._stream.prompt_logprobs

    async def get(self, *, at_least: int = 1) -> list[SequenceDelta]:
        """The news of all sequences that have some.

        Args:
            at_least: as in `EngineStream.get`; where stop strings are looked for, every token counts.

        Raises:
            PagodaError: the request was rejected, a sequence failed, or its time is over.
        """
        deltas = []
        for output in await self._stream.get(at_least=1 if self._has_stop_strings else at_least):
            if output.finish_reason == "error":
                raise output.error or RequestFailed("the engine failed this request")
            text = self._texts[output.index]
            for part, is_replayed in _cut(output, self._known) if self._known else ((output, False),):
                deltas.append(text.append(part))
                deltas[-1].prompt_logprobs = self._stream.prompt_logprobs
                deltas[-1].is_replayed = is_replayed
                if text.has_met_stop_string:
                    self._stream.stop(output.index)
                    break
        return deltas

    def close(self) -> None:
        """End what is still running, and free what is not read."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._stream.abort()
        self._stream.drop()


def _cut(output: EngineOutput, known: tuple[Known, ...]) -> list[tuple[EngineOutput, bool]]:
    """`output` cut where what the client has ends; with each part, whether the client has it."""
    has = known[output.index]
    num_known = has.num_tokens - output.offset
    if len(output.token_ids) <= num_known and (output.finish_reason is None or has.is_finished):
        return [(output, True)]
    if num_known <= 0:
        return [(output, False)]
    logprobs = output.logprobs
    head = replace(
        output,
        token_ids=output.token_ids[:num_known],
        logprobs=None if logprobs is None else logprobs[:num_known],
        finish_reason=None,
        stop_token_id=None,
    )
    tail = replace(
        output,
        offset=has.num_tokens,
        token_ids=output.token_ids[num_known:],
        logprobs=None if logprobs is None else logprobs[num_known:],
    )
    return [(head, True), (tail, False)]


async def generate_text(
    engine: Engine, tokenizer: Tokenizer | None, request: EngineRequest
) -> AsyncGenerator[list[SequenceDelta], None]:
    """Submit `request` and give the news of its sequences until all have ended.

    Closing or cancelling the generator aborts the request.

    Raises:
        PagodaError: the request was rejected, or a sequence failed.
    """
    stream = TextStream(engine=engine, tokenizer=tokenizer, request=request)
    try:
        while not stream.is_finished:
            if deltas := await stream.get():
                yield deltas
    finally:
        stream.close()
