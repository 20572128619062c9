"""One Session stream to the scheduler, from hello to its end: slots, columns in, batches out.

A session is used once. Open requests and their tokens, which outlive it, are in EngineStream; EngineClient makes a new
session and submits them again.
"""

import asyncio
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import grpc.aio
import numpy as np

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from pagoda_common.engine.convert import (
    FINISH_NUMBERS,
    FINISH_REASONS,
    UINT32,
    beam_search_params_to_proto,
    error_from_proto,
    lora_adapter_to_proto,
    pooling_params_to_proto,
    sampling_params_to_proto,
    token_ids_to_bytes,
)
from pagoda_common.engine.stream import EngineStream, SequenceLog
from pagoda_common.errors import Code, NotReady, PagodaError, RequestFailed
from pagoda_common.params.outputs import HypothesisLogprobs, TokenLogprobs
from pagoda_common.version import VERSION

HELLO_TIMEOUT_S = 10.0
ACK_EVERY = 16
"""Messages after which the scheduler gets an acknowledgement. It sends twice as many ahead: what is new waits for them
here, where the frontend is short of processor time."""
ACK_BYTES = 1024 * 1024
"""It reports fewer when they are so large: its window counts bytes as well."""
ACK_DELAY_S = 1.0
"""After so long it reports fewer and smaller ones. Nothing waits for that: they are a small part of its window."""
ENDS = (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH)
"""Ends of a sequence that has all requested tokens."""
MAX_BATCH_BYTES = 256 * 1024
"""A FrontendBatch is closed when it has grown beyond this: its reader holds all of it at once, taken apart."""


class SessionSlots:
    """The small integers by which this session names its sequences.

    A slot is handed out again only after the scheduler has reported its end: nothing that is under way can name it
    then. A slot whose sequence no one wants any more stays taken until that report.
    """

    def __init__(self) -> None:
        self._sequences: list[SequenceLog | None] = []
        self._free: deque[int] = deque()

    def add(self, sequence: SequenceLog) -> int:
        """Give `sequence` a slot."""
        if self._free:
            slot = self._free.popleft()
            self._sequences[slot] = sequence
            return slot
        self._sequences.append(sequence)
        return len(self._sequences) - 1

    def get(self, slot: int) -> SequenceLog | None:
        """The sequence with `slot`; None if no one listens."""
        return self._sequences[slot] if slot < len(self._sequences) else None

    def retire(self, slots: Iterable[int]) -> None:
        """No one listens to these any more."""
        for slot in slots:
            self._sequences[slot] = None

    def release(self, slot: int) -> None:
        """The scheduler has reported the end of `slot`."""
        if slot < len(self._sequences):
            self._sequences[slot] = None
            self._free.append(slot)


class EngineSession:
    """Speaks with one scheduler until the stream breaks."""

    def __init__(
        self,
        *,
        stub: "scheduler_pb2_grpc.SchedulerAsyncStub",
        frontend_id: str,
        streams: dict[str, EngineStream],
        on_open: Callable[["EngineSession"], None],
        on_state: Callable[[scheduler_pb2.SchedulerMessage], None],
        loras: scheduler_pb2.LoraList | None = None,
    ) -> None:
        """
        Args:
            streams: open requests by id; entries are removed when they are done.
            on_open: called after the hello; submits what is open.
            on_state: called with each message that carries load, model_info or loras, the hello included.
            loras: the adapters that were listed last, for a scheduler that does not know them.
        """
        self._stub = stub
        self._frontend_id = frontend_id
        self._streams = streams
        self._on_open = on_open
        self._on_state = on_state
        self._loras = loras
        self._slots = SessionSlots()
        self._slots_of: dict[str, list[int]] = {}
        self._outbox: deque[scheduler_pb2.FrontendMessage] = deque()
        self._has_outgoing = asyncio.Event()
        self._epoch = 0
        self._num_received = 0
        self._num_acknowledged = 0
        self._num_unacknowledged_bytes = 0
        self._acknowledges = False
        self._ack_timer: asyncio.TimerHandle | None = None

    @property
    def num_outgoing(self) -> int:
        """Messages that wait to be written."""
        return len(self._outbox)

    async def run(self) -> None:
        """Open the stream and read until it breaks.

        Raises:
            grpc.aio.AioRpcError, NotReady: how it broke; it never returns otherwise.
        """
        call = self._stub.Session()
        try:
            hello = scheduler_pb2.FrontendHello(frontend_id=self._frontend_id, version=VERSION, acknowledges=True)
            hello.acknowledges_every = ACK_EVERY
            if self._loras is not None:
                hello.loras.CopyFrom(self._loras)
            await call.write(scheduler_pb2.FrontendMessage(hello=hello))
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first: Any = await call.read()
            if first is grpc.aio.EOF or not first.HasField("hello"):
                await self._raise_end(call, "the scheduler did not send hello")
            self._epoch = first.session_epoch
            self._acknowledges = first.hello.takes_acknowledgements
            self._on_open(self)
            self._receive(first)
            self._count(first)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(call))
                tasks.create_task(self._read(call))
        except TimeoutError as error:
            raise NotReady(f"the scheduler did not send hello within {HELLO_TIMEOUT_S:g} s") from error
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            call.cancel()
            if self._ack_timer is not None:
                self._ack_timer.cancel()

    def submit(self, stream: EngineStream) -> None:
        """Send the request, with its tokens so far when it was sent before."""
        request = stream.request
        self._slots.retire(self._slots_of.pop(request.request_id, ()))
        slots = [self._slots.add(sequence) for sequence in stream.sequences]
        self._slots_of[request.request_id] = slots
        stream.attempt += 1
        message = scheduler_pb2.SubmitRequest(
            request_id=request.request_id,
            attempt=stream.attempt,
            slots=slots,
            prompt_token_ids=token_ids_to_bytes(request.prompt_token_ids),
            sampling_params=sampling_params_to_proto(request.sampling_params),
            eos_token_ids=request.eos_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            timeout_s=stream.remaining_s,
            arrival_time_ns=stream.arrival_time_ns,
            tenant=request.tenant,
            resume_key=request.resume_key,
            frontend_note=request.note,
            traceparent=request.traceparent,
            group=request.group,
            client=request.client,
        )
        if request.lora is not None:
            message.lora.CopyFrom(lora_adapter_to_proto(request.lora))
        if request.pooling is not None:
            message.pooling.CopyFrom(pooling_params_to_proto(request.pooling))
        elif request.beam_search is not None:  # its tokens arrive all at once: nothing can be continued
            message.beam_search.CopyFrom(beam_search_params_to_proto(request.beam_search))
        elif stream.attempt > 1:
            for sequence in stream.sequences:
                resumed = message.resume.sequences.add(
                    output_token_ids=token_ids_to_bytes(sequence.token_ids), is_finished=sequence.is_finished
                )
                if sequence.finish_reason is not None:
                    resumed.finish_reason = FINISH_NUMBERS[sequence.finish_reason]
                if sequence.stop_token_id is not None:
                    resumed.stop_token_id = sequence.stop_token_id
        self._send(scheduler_pb2.FrontendMessage(submit=message))

    def stop(self, request_id: str, index: int) -> None:
        """End one sequence."""
        if (slots := self._slots_of.get(request_id)) is not None:
            self._slots.retire([slots[index]])
            self._send(scheduler_pb2.FrontendMessage(stop=scheduler_pb2.StopSequences(slots=[slots[index]])))

    def abort(self, request_id: str) -> None:
        """End a request."""
        if (slots := self._slots_of.get(request_id)) is not None:
            self._slots.retire(slots)
            last = self._outbox[-1] if self._outbox else None
            if last is not None and last.HasField("abort"):  # many at once are one message, and one answer
                last.abort.request_ids.append(request_id)
            else:
                self._send(scheduler_pb2.FrontendMessage(abort=scheduler_pb2.AbortRequest(request_ids=[request_id])))

    def release(self, request_id: str) -> None:
        """The client has everything."""
        self._send(scheduler_pb2.FrontendMessage(release=scheduler_pb2.ReleaseRequests(request_ids=[request_id])))

    def forget(self, request_id: str) -> None:
        """End this request here; its slots are free when their ends were reported."""
        self._slots_of.pop(request_id, None)

    def _send(self, message: scheduler_pb2.FrontendMessage) -> None:
        self._outbox.append(message)
        self._has_outgoing.set()

    async def _write(self, call: Any) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            while self._outbox:
                try:
                    await call.write(self._next_message())
                except asyncio.InvalidStateError:
                    return  # the stream has ended; _read says why

    def _next_message(self) -> scheduler_pb2.FrontendMessage:
        """The waiting messages as one message."""
        first = self._outbox.popleft()
        if not self._outbox:
            return first
        messages, size = [first], first.ByteSize()
        while self._outbox and size < MAX_BATCH_BYTES:
            messages.append(self._outbox.popleft())
            size += messages[-1].ByteSize()
        return scheduler_pb2.FrontendMessage(batch=scheduler_pb2.FrontendBatch(messages=messages))

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.session_epoch >= self._epoch:  # anything older comes from a scheduler that was replaced
                self._receive(message)
            self._count(message)
        await self._raise_end(call, "the scheduler ended the session")

    async def _raise_end(self, call: Any, message: str) -> None:
        code = await call.code()
        raise NotReady(f"{message}: {await call.details()}" if code is not grpc.StatusCode.OK else message)

    def _count(self, message: scheduler_pb2.SchedulerMessage) -> None:
        """`message` was taken."""
        self._num_received += 1
        self._num_unacknowledged_bytes += message.ByteSize()
        num_messages = self._num_received - self._num_acknowledged
        if num_messages >= ACK_EVERY or self._num_unacknowledged_bytes >= ACK_BYTES:
            self._acknowledge()
        elif self._ack_timer is None and self._acknowledges:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._acknowledge)

    def _acknowledge(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        self._num_acknowledged = self._num_received
        self._num_unacknowledged_bytes = 0
        if self._acknowledges:
            taken = scheduler_pb2.Acknowledgement(num_messages=self._num_received)
            self._send(scheduler_pb2.FrontendMessage(acknowledgement=taken))

    def _receive(self, message: scheduler_pb2.SchedulerMessage) -> None:
        if message.HasField("load") or message.HasField("model_info") or message.HasField("loras"):
            self._on_state(message)
        # Most messages are tokens alone; to find a list empty costs a quarter of a loop over it.
        if message.admitted:
            self._take_admissions(message)
        if message.prompt_logprobs:
            for prompt in message.prompt_logprobs:
                self._take_prompt_logprobs(prompt)
        gaps: dict[str, EngineStream] = {}
        if message.slots:
            self._take_tokens(message, gaps)
        if message.finished:
            for finished in message.finished:
                self._take_end(finished, gaps)
        if message.rejected:
            for rejected in message.rejected:
                self._take_rejection(rejected)
        for stream in gaps.values():
            self._close_gap(stream)

    def _take_admissions(self, message: scheduler_pb2.SchedulerMessage) -> None:
        for admitted in message.admitted:
            if (sequence := self._slots.get(admitted.slot)) is not None:
                if sequence.num_cached_tokens is None:  # after a loss, the first attempt's stands
                    sequence.num_cached_tokens = admitted.num_cached_tokens
                if sequence.queue_s is None:
                    sequence.queue_s = admitted.queue_ns / 1e9

    def _take_tokens(self, message: scheduler_pb2.SchedulerMessage, gaps: dict[str, EngineStream]) -> None:
        slots = _integers(message.slots)
        offsets = _integers(message.offsets)
        token_ids = _integers(message.token_ids)
        get = self._slots.get
        if not message.counts and not message.HasField("logprobs"):
            # The usual step: one token each, its offset the next one.
            for slot, offset, token_id in zip(slots, offsets, token_ids, strict=True):
                sequence = get(slot)
                if sequence is None:
                    continue
                is_next = offset == len(sequence.token_ids) and sequence.logprobs is None
                if is_next and sequence.finish_reason is None and not sequence.is_closed:
                    sequence.token_ids.append(token_id)
                    sequence.stream.wake(sequence)
                elif not sequence.extend(offset, [token_id]):
                    gaps[sequence.stream.request.request_id] = sequence.stream
            return
        counts = list(message.counts) or [1] * len(slots)
        logprobs = logprob_rows(message.logprobs) if message.HasField("logprobs") else {}
        start = 0
        for slot, offset, count in zip(slots, offsets, counts, strict=True):
            sequence, end = get(slot), start + count
            if sequence is not None:
                entries = [logprobs[row] for row in range(start, end) if row in logprobs]
                if not sequence.extend(offset, token_ids[start:end], entries):
                    gaps[sequence.stream.request.request_id] = sequence.stream
            start = end

    def _take_prompt_logprobs(self, prompt: scheduler_pb2.SessionPromptLogprobs) -> None:
        sequence = self._slots.get(prompt.slot)
        if sequence is None:
            return
        stream = sequence.stream
        known = stream.prompt_logprobs
        for row, entry in logprob_rows(prompt.logprobs).items():
            if known is not None and prompt.start + row < len(known):
                known[prompt.start + row] = entry

    def _take_end(self, finished: scheduler_pb2.FinishedSequence, gaps: dict[str, EngineStream]) -> None:
        sequence = self._slots.get(finished.slot)
        self._slots.release(finished.slot)
        if sequence is None:
            return
        stream = sequence.stream
        is_error = finished.finish_reason == types_pb2.FINISH_REASON_ERROR
        if not is_error and finished.num_output_tokens > len(sequence.token_ids):
            gaps[stream.request.request_id] = stream
            return
        sequence.num_preemptions = finished.num_preemptions
        if finished.HasField("hypothesis"):
            found = finished.hypothesis
            sequence.hypothesis = HypothesisLogprobs(found.cumulative_logprob, list(found.logprobs), list(found.ranks))
        if finished.embedding:
            sequence.embedding = np.frombuffer(finished.embedding, "<f4")
        elif stream.request.pooling is not None and finished.finish_reason in ENDS:
            sequence.finish("error", error=PagodaError("the engine does not support pooling", code=Code.UNIMPLEMENTED))
        error = error_from_proto(finished.error) if is_error else None
        if error is not None and error.code is Code.DEADLINE_EXCEEDED:
            error = stream.overdue_error()  # the engine knows only what was left of the time limit
        sequence.finish(
            FINISH_REASONS.get(finished.finish_reason, "error"),
            stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
            error=error,
        )
        if stream.is_done:
            self._streams.pop(stream.request.request_id, None)
            self.forget(stream.request.request_id)

    def _take_rejection(self, rejected: scheduler_pb2.RejectedRequest) -> None:
        for slot in self._slots_of.pop(rejected.request_id, ()):
            self._slots.release(slot)
        if (stream := self._streams.get(rejected.request_id)) is None:
            return
        if stream.can_retry(error := error_from_proto(rejected.error)):
            delay_s = max(error.retry_after_s, 0.2)
            asyncio.get_running_loop().call_later(delay_s, self._submit_again, stream)
            return
        del self._streams[rejected.request_id]
        stream.fail(error)

    def _submit_again(self, stream: EngineStream) -> None:
        request_id = stream.request.request_id
        if self._streams.get(request_id) is stream and request_id not in self._slots_of:
            self.submit(stream)

    def _close_gap(self, stream: EngineStream) -> None:
        if stream.count_resubmit():
            self.submit(stream)
            return
        self.abort(stream.request.request_id)
        self.forget(stream.request.request_id)
        self._streams.pop(stream.request.request_id, None)
        for sequence in stream.sequences:
            sequence.finish("error", error=RequestFailed("the engine keeps leaving out tokens of this request"))


def _integers(column: bytes) -> tuple[int, ...]:
    """A little-endian uint32 column; struct is twice as fast as numpy for one integer, and no slower for hundreds."""
    return struct.unpack(f"<{len(column) // 4}I", column)


def logprob_rows(message: types_pb2.LogprobColumns) -> dict[int, TokenLogprobs]:
    """Log probabilities by row, an index into the message's token_ids; as arrays: lists take four times the memory."""
    rows = np.frombuffer(message.rows, UINT32).tolist()
    ends = np.cumsum(np.frombuffer(message.counts, UINT32)).tolist()
    ranks = np.frombuffer(message.sampled_ranks, UINT32).tolist()
    token_ids = array("I", message.token_ids)
    logprobs = array("f", message.logprobs)
    entries, start = {}, 0
    for row, end, rank in zip(rows, ends, ranks, strict=True):
        entries[row] = TokenLogprobs(token_ids=token_ids[start:end], logprobs=logprobs[start:end], sampled_rank=rank)
        start = end
    return entries
