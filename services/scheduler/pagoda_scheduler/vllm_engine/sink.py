"""The tokens of one request as VllmEngine's responses."""

from collections.abc import Callable, Iterator

import numpy as np
from smg_grpc_proto import vllm_engine_pb2

from pagoda_common.errors import PagodaError
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import LogprobRows
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.rpc.outbox import Outbox

_FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "error": "error"}


class VllmEngineSink:
    """Sends deltas as chunks if the caller streams, and one `complete` per sequence at its end."""

    def __init__(
        self,
        *,
        num_sequences: int,
        streams: bool,
        num_logprobs: int | None,
        takes_prompt: bool,
        on_room: Callable[["VllmEngineSink"], None],
    ) -> None:
        """`num_logprobs`: number of likeliest tokens per token, None for no log probabilities; `takes_prompt`: also
        those of the prompt; `on_room`: called when the client was too slow and has caught up."""
        self.outbox: Outbox[vllm_engine_pb2.GenerateResponse] = Outbox(on_room=lambda: on_room(self))
        self._num_open = num_sequences
        self._streams = streams
        self._num_logprobs = num_logprobs
        self._output_logprobs: dict[int, vllm_engine_pb2.OutputLogProbs] = {}
        self._input_logprobs = vllm_engine_pb2.InputLogProbs() if takes_prompt else None
        self._has_sent_input = False

    @property
    def is_behind(self) -> bool:
        """Whether the client is too slow."""
        return self.outbox.is_full

    def announce(self) -> None:
        """No-op: the stream reports nothing outside of a step."""

    def close(self, error: PagodaError) -> None:
        """End the stream."""
        self.outbox.close(error)

    def push(self, result: StepResult) -> None:
        """Send one step's tokens."""
        for request, chunk in result.prompt_logprobs:
            self._add_prompt(request, chunk.logprobs)
        rows = {} if self._num_logprobs is None or result.logprobs is None else dict(_rows(result.logprobs))
        for position, request in enumerate(result.requests):
            logprobs = vllm_engine_pb2.OutputLogProbs()
            if (row := rows.get(result.rows[position])) is not None:
                self._add(logprobs, *row)
                self._output_logprobs.setdefault(request.index, vllm_engine_pb2.OutputLogProbs()).MergeFrom(logprobs)
            if self._streams:
                self.outbox.put(self._chunk(request, result.token_ids[position], result.offsets[position], logprobs))
        failed: PagodaError | None = None
        for request in result.finished:
            self.outbox.put(self._complete(request))
            failed = failed or request.error
        self._num_open -= len(result.finished)
        if failed is not None or self._num_open == 0:
            self.outbox.close(failed)

    def _chunk(
        self, request: Request, token_id: int, offset: int, logprobs: vllm_engine_pb2.OutputLogProbs
    ) -> vllm_engine_pb2.GenerateResponse:
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=[token_id],
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=offset + 1,
            cached_tokens=request.num_cached_tokens,
            index=request.index,
        )
        if self._num_logprobs is not None:
            chunk.output_logprobs.CopyFrom(logprobs)
        if self._input_logprobs is not None and not self._has_sent_input:
            self._has_sent_input = True
            chunk.input_logprobs.CopyFrom(self._input_logprobs)
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def _complete(self, request: Request) -> vllm_engine_pb2.GenerateResponse:
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=request.output_token_ids,
            finish_reason=_FINISH_REASONS.get(request.finish_reason or "", "error"),
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=len(request.output_token_ids),
            cached_tokens=request.num_cached_tokens,
            index=request.index,
        )
        if request.stop_token_id is not None:
            complete.matched_token_id = request.stop_token_id
        if request.index in self._output_logprobs:
            complete.output_logprobs.CopyFrom(self._output_logprobs[request.index])
        if self._input_logprobs is not None:
            complete.input_logprobs.CopyFrom(self._input_logprobs)
        return vllm_engine_pb2.GenerateResponse(complete=complete)

    def _add(self, to: vllm_engine_pb2.OutputLogProbs, token_ids: list[int], logprobs: list[float]) -> None:
        """Log probabilities of one token, the sampled token first."""
        to.token_ids.append(token_ids[0])
        to.token_logprobs.append(logprobs[0])
        ranked = sorted(zip(logprobs, token_ids, strict=True), reverse=True)
        likeliest = ranked if self._num_logprobs == -1 else ranked[: self._num_logprobs or 0]
        to.top_logprobs.add(values=[value for value, _ in likeliest], token_ids=[token for _, token in likeliest])

    def _add_prompt(self, request: Request, logprobs: LogprobRows) -> None:
        if self._input_logprobs is None:
            return
        if not self._input_logprobs.token_ids:  # the first token has no predecessor
            self._input_logprobs.token_ids.append(request.prompt_token_ids[0])
            self._input_logprobs.token_logprobs.add()
            self._input_logprobs.top_logprobs.add()
        for _, (token_ids, values) in _rows(logprobs):
            self._input_logprobs.token_ids.append(token_ids[0])
            self._input_logprobs.token_logprobs.add(value=values[0])
            ranked = sorted(zip(values, token_ids, strict=True), reverse=True)
            self._input_logprobs.top_logprobs.add(
                values=[value for value, _ in ranked], token_ids=[token for _, token in ranked]
            )


def _rows(logprobs: LogprobRows) -> Iterator[tuple[int, tuple[list[int], list[float]]]]:
    """(row, (token ids, log probabilities)) of each row."""
    ends = np.cumsum(logprobs.counts, dtype=np.int64)
    for row, count, end in zip(logprobs.rows.tolist(), logprobs.counts.tolist(), ends.tolist(), strict=True):
        entries = slice(end - count, end)
        yield row, (logprobs.token_ids[entries].tolist(), logprobs.logprobs[entries].tolist())
