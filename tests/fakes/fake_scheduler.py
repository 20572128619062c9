"""A pagoda.v1.Scheduler whose tokens are known beforehand, and that misbehaves on demand. No model, no worker.

fake = FakeScheduler(step_s=0.001)
async with serve_fake_scheduler(fake) as address:
    ...
assert fake.aborted == ["a"]
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from pagoda_common.engine.convert import error_to_proto, token_ids_from_bytes, token_ids_to_bytes
from pagoda_common.errors import NotReady, PagodaError
from pagoda_common.rpc.service import RpcServer
from tests.fakes.fake_sleep import FakeSleep

SAMPLED_LOGPROB = -0.5


@dataclass(eq=False)
class FakeSequence:
    """One sequence that a session generates."""

    request: scheduler_pb2.SubmitRequest
    prompt_token_ids: list[int]
    index: int
    slot: int
    eos_token_ids: tuple[int, ...]
    offset: int = 0
    is_admitted: bool = False


@dataclass(eq=False)
class _Session:
    """What one connected frontend has open, and the messages that wait for it."""

    outbox: asyncio.Queue[scheduler_pb2.SchedulerMessage | None] = field(default_factory=asyncio.Queue)
    sequences: dict[int, FakeSequence] = field(default_factory=dict)
    num_step_messages: int = 0


class FakeScheduler(FakeSleep, scheduler_pb2_grpc.SchedulerServicer):
    """Token `offset` of sequence `index` is (last prompt token + 1 + offset + 100 * index) mod vocab_size, or
    scripted.

    A sequence ends at max_tokens or the end of the context, at an end or stop token, or when its script is used up (an
    end token is sent then); with pooling at once, with what `embedding` says. Every attribute may be changed while it
    serves.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 3072,
        max_model_len: int = 512,
        eos_token_ids: tuple[int, ...] = (0, 2),
        step_s: float = 0.0,
        tokens_per_step: int = 1,
    ) -> None:
        super().__init__()
        self.model_info = types_pb2.ModelInfo(
            model="fake",
            architecture="FakeForCausalLM",
            dtype="float32",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            embedding_size=4,
        )
        self.load = types_pb2.EngineLoad(is_ready=True, num_groups=1, num_total_blocks=100, block_size=16)
        self.epoch = 1
        self.step_s = step_s
        """Seconds between steps."""
        self.tokens_per_step = tokens_per_step
        self.num_cached_tokens = 0
        """Reported when a sequence is admitted."""
        self.queue_ns = 0
        """Reported when a sequence is admitted."""
        self.logprob_of: dict[int, float] = {}
        """Log probabilities of sampled tokens, where they are not SAMPLED_LOGPROB."""
        self.scripts: dict[str, list[int]] = {}
        """Output of every sequence of a request, by request_id."""
        self.script: list[int] | None = None
        """Output of every request that has no script of its own."""
        self.reject: dict[str, PagodaError] = {}
        """Requests to reject, by request_id; "*" is every request."""
        self.fail_at: dict[str, int] = {}
        """Requests that end with an error at this offset, by request_id."""
        self.drop_after: int | None = None
        """Break the stream, once, after this many messages with tokens."""
        self.is_duplicating = False
        """Repeat in every message the token before."""
        self.gap_at: int | None = None
        """Leave out, once, the token at this offset."""
        self.is_paused = False
        """Generate nothing."""
        self.submits: list[scheduler_pb2.SubmitRequest] = []
        self.aborted: list[str] = []
        """request_ids of abort messages, in order."""
        self.stopped: list[tuple[str, int]] = []
        """(request_id, index) of StopSequences, in order."""
        self.hellos: list[scheduler_pb2.FrontendHello] = []
        self.batch_sizes: list[int] = []
        """Messages in each FrontendBatch."""
        self.errors: list[BaseException] = []
        """What went wrong in here, such as a resume with other tokens than were sent."""
        self._sessions: set[_Session] = set()
        self._step = itertools.count(1)

    def token(self, prompt_token_ids: list[int], offset: int, index: int = 0) -> int:
        """The token that an unscripted sequence has at `offset`."""
        last = prompt_token_ids[-1] if prompt_token_ids else 0
        return (last + 1 + offset + 100 * index) % self.model_info.vocab_size

    def tokens(self, prompt_token_ids: list[int], num_tokens: int, index: int = 0) -> list[int]:
        """The first `num_tokens` tokens of an unscripted sequence."""
        return [self.token(prompt_token_ids, offset, index) for offset in range(num_tokens)]

    def embedding(self, prompt_token_ids: list[int], *, is_unit: bool = True) -> bytes:
        """That of a prompt: its length, its last token, zeros; with -1 at the end where it need not be a unit."""
        values = np.zeros(self.model_info.embedding_size, dtype="<f4")
        values[:2] = len(prompt_token_ids), prompt_token_ids[-1]
        values[-1] = 0 if is_unit else -1
        return values.tobytes()

    @property
    def num_open_sequences(self) -> int:
        return sum(len(session.sequences) for session in self._sessions)

    def set_ready(self, is_ready: bool, reason: str = "") -> None:
        """Change the load and tell every session."""
        self.load.is_ready = is_ready
        self.load.not_ready_reason = reason
        for session in self._sessions:
            session.outbox.put_nowait(scheduler_pb2.SchedulerMessage(session_epoch=self.epoch, load=self.load))

    def restart(self) -> None:
        """Forget every session and come back with a higher epoch."""
        self.epoch += 1
        for session in self._sessions:
            session.sequences.clear()
            session.outbox.put_nowait(None)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[scheduler_pb2.SchedulerMessage]:
        session = _Session()
        tasks = [
            asyncio.create_task(self._read(session, request_iterator)),
            asyncio.create_task(self._generate(session)),
        ]
        for task in tasks:
            task.add_done_callback(lambda task: self._report(session, task))
        self._sessions.add(session)
        try:
            yield scheduler_pb2.SchedulerMessage(
                session_epoch=self.epoch,
                hello=scheduler_pb2.SchedulerHello(version="fake"),
                load=self.load,
                model_info=self.model_info,
            )
            while (message := await session.outbox.get()) is not None:
                yield message
            raise NotReady("the fake dropped the stream")
        finally:
            self._sessions.discard(session)
            for task in tasks:
                task.cancel()

    async def GetMetrics(
        self, request: scheduler_pb2.GetMetricsRequest, context: Any
    ) -> scheduler_pb2.GetMetricsResponse:
        return scheduler_pb2.GetMetricsResponse(text=b'vllm:iteration_tokens_total_count{engine="0"} 3.0\n')

    async def GetLoad(self, request: scheduler_pb2.GetLoadRequest, context: Any) -> types_pb2.EngineLoad:
        return self.load

    async def GetModelInfo(self, request: Any, context: Any) -> types_pb2.ModelInfo:
        return self.model_info

    async def Abort(self, request: scheduler_pb2.AbortRequest, context: Any) -> scheduler_pb2.AbortResponse:
        for session in self._sessions:
            self._abort(session, request)
        return scheduler_pb2.AbortResponse()

    def _report(self, session: _Session, task: "asyncio.Task[None]") -> None:
        """A mistake of the test or of this fake: keep it for the test, and break the stream."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)
            session.outbox.put_nowait(None)

    async def _read(self, session: _Session, request_iterator: Any) -> None:
        async for message in request_iterator:
            self._apply(session, message)

    def _apply(self, session: _Session, message: scheduler_pb2.FrontendMessage) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self.hellos.append(message.hello)
            case "submit":
                self._submit(session, message.submit)
            case "abort":
                self._abort(session, message.abort)
            case "stop":
                for slot in message.stop.slots:
                    if (sequence := session.sequences.pop(slot, None)) is not None:
                        self.stopped.append((sequence.request.request_id, sequence.index))
                        self._send_finished(session, sequence, types_pb2.FINISH_REASON_STOP)
            case "batch":
                self.batch_sizes.append(len(message.batch.messages))
                for inner in message.batch.messages:
                    self._apply(session, inner)

    def _submit(self, session: _Session, request: scheduler_pb2.SubmitRequest) -> None:
        self.submits.append(request)
        error = self.reject.get(request.request_id, self.reject.get("*"))
        if error is not None:
            rejected = scheduler_pb2.RejectedRequest(request_id=request.request_id, error=error_to_proto(error))
            session.outbox.put_nowait(
                scheduler_pb2.SchedulerMessage(session_epoch=self.epoch, rejected=[rejected], load=self.load)
            )
            return
        for slot in [s for s, q in session.sequences.items() if q.request.request_id == request.request_id]:
            del session.sequences[slot]
        prompt = token_ids_from_bytes(request.prompt_token_ids)
        for index, slot in enumerate(request.slots):
            assert slot not in session.sequences, f"slot {slot} is taken"
            eos = tuple(request.eos_token_ids) or tuple(self.model_info.eos_token_ids)
            sequence = FakeSequence(request, prompt, index, slot, eos)
            if request.HasField("resume"):
                state = request.resume.sequences[index]
                if state.is_finished:
                    continue
                known = token_ids_from_bytes(state.output_token_ids)
                expected = [self._next_token(sequence, offset) for offset in range(len(known))]
                assert known == expected, f"resumed with {known}, expected {expected}"
                sequence.offset = len(known)
            session.sequences[slot] = sequence

    def _abort(self, session: _Session, request: scheduler_pb2.AbortRequest) -> None:
        for request_id in request.request_ids:
            self.aborted.append(request_id)
            for slot, sequence in list(session.sequences.items()):
                if sequence.request.request_id == request_id:
                    del session.sequences[slot]
                    self._send_finished(session, sequence, types_pb2.FINISH_REASON_ABORT)

    def _send_finished(self, session: _Session, sequence: FakeSequence, reason: types_pb2.FinishReason) -> None:
        finished = scheduler_pb2.FinishedSequence(
            slot=sequence.slot, finish_reason=reason, num_output_tokens=sequence.offset
        )
        session.outbox.put_nowait(
            scheduler_pb2.SchedulerMessage(session_epoch=self.epoch, finished=[finished], load=self.load)
        )

    async def _generate(self, session: _Session) -> None:
        while True:
            # Without work there is nothing to wake this fake: it looks every millisecond.
            await asyncio.sleep(self.step_s if session.sequences else 0.001)
            if self.is_paused or not session.sequences:
                continue
            session.outbox.put_nowait(self._run_step(session))
            session.num_step_messages += 1
            if self.drop_after is not None and session.num_step_messages >= self.drop_after:
                self.drop_after = None
                session.sequences.clear()
                session.outbox.put_nowait(None)

    def _run_step(self, session: _Session) -> scheduler_pb2.SchedulerMessage:
        message = scheduler_pb2.SchedulerMessage(session_epoch=self.epoch, step=next(self._step))
        slots: list[int] = []
        offsets: list[int] = []
        runs: list[list[int]] = []
        rows: list[tuple[int, int, int]] = []  # (row in token_ids, token, number of top entries)
        for sequence in list(session.sequences.values()):
            if not sequence.is_admitted:
                sequence.is_admitted = True
                message.admitted.add(
                    slot=sequence.slot, num_cached_tokens=self.num_cached_tokens, queue_ns=self.queue_ns
                )
                if sequence.request.sampling_params.HasField("prompt_logprobs"):
                    num_top = sequence.request.sampling_params.prompt_logprobs
                    described = [(row, token, num_top) for row, token in enumerate(sequence.prompt_token_ids[1:])]
                    message.prompt_logprobs.add(slot=sequence.slot, start=1, logprobs=self._logprobs(described))
            offset, run = self._run(message, sequence)
            if message.finished and message.finished[-1].slot == sequence.slot:
                del session.sequences[sequence.slot]
            if not run:
                continue
            num_before = sum(map(len, runs))
            if sequence.request.sampling_params.HasField("logprobs"):
                num_top = sequence.request.sampling_params.logprobs
                rows += [(num_before + place, token, num_top) for place, token in enumerate(run)]
            slots.append(sequence.slot)
            offsets.append(offset)
            runs.append(run)
        message.slots = token_ids_to_bytes(slots)
        message.offsets = token_ids_to_bytes(offsets)
        if any(len(run) != 1 for run in runs):
            message.counts = bytes(map(len, runs))
        message.token_ids = token_ids_to_bytes([token for run in runs for token in run])
        if rows:
            message.logprobs.CopyFrom(self._logprobs(rows))
        self.load.num_running_reqs = len(session.sequences)
        self.load.num_steps = message.step
        message.load.CopyFrom(self.load)
        return message

    def _run(self, message: scheduler_pb2.SchedulerMessage, sequence: FakeSequence) -> tuple[int, list[int]]:
        """The sequence's next tokens and their first offset; adds its end to `message`."""
        start, run = sequence.offset, []
        params = sequence.request.sampling_params
        end = {"slot": sequence.slot, "num_output_tokens": start}
        # A beam search has its whole output at once.
        num_tokens = params.max_tokens if sequence.request.HasField("beam_search") else self.tokens_per_step
        if sequence.request.HasField("pooling") and sequence.request.request_id not in self.fail_at:
            pooling = sequence.request.pooling
            is_unit = pooling.normalize if pooling.HasField("normalize") else True
            embedding = self.embedding(sequence.prompt_token_ids, is_unit=is_unit)
            message.finished.add(**end, finish_reason=types_pb2.FINISH_REASON_STOP, embedding=embedding)
            return start, run
        for _ in range(num_tokens):
            if sequence.offset == self.fail_at.get(sequence.request.request_id, -1):
                error = types_pb2.RequestError(code=13, message="the fake failed this request")
                message.finished.add(**end, finish_reason=types_pb2.FINISH_REASON_ERROR, error=error)
                break
            token = self._next_token(sequence, sequence.offset)
            run.append(token)
            sequence.offset += 1
            end["num_output_tokens"] = sequence.offset
            if token in params.stop_token_ids:
                message.finished.add(**end, finish_reason=types_pb2.FINISH_REASON_STOP, stop_token_id=token)
                break
            if token in sequence.eos_token_ids and not params.ignore_eos:
                message.finished.add(**end, finish_reason=types_pb2.FINISH_REASON_STOP)
                break
            room = self.model_info.max_model_len - len(sequence.prompt_token_ids)
            if sequence.offset >= min(params.max_tokens or room, room):
                message.finished.add(**end, finish_reason=types_pb2.FINISH_REASON_LENGTH)
                break
        if sequence.request.HasField("beam_search") and message.finished:
            hypothesis = message.finished[-1].hypothesis
            hypothesis.cumulative_logprob = SAMPLED_LOGPROB * len(run)
            hypothesis.logprobs.extend([SAMPLED_LOGPROB] * len(run))
            hypothesis.ranks.extend([1] * len(run))
        if self.gap_at is not None and start <= self.gap_at < sequence.offset:
            run = run[self.gap_at - start + 1 :]
            start, self.gap_at = self.gap_at + 1, None
        elif self.is_duplicating and start > 0:
            start -= 1
            run.insert(0, self._next_token(sequence, start))
        return start, run

    def _next_token(self, sequence: FakeSequence, offset: int) -> int:
        script = self.scripts.get(sequence.request.request_id, self.script)
        if script is None:
            return self.token(sequence.prompt_token_ids, offset, sequence.index)
        return script[offset] if offset < len(script) else sequence.eos_token_ids[0]

    def _logprobs(self, rows: list[tuple[int, int, int]]) -> types_pb2.LogprobColumns:
        """The sampled token has rank 1 and -0.5, the next ids follow at -1.5, -2.5, …"""
        ids: list[int] = []
        values: list[float] = []
        for _, token, num_top in rows:
            ids += [token, *((token + place) % self.model_info.vocab_size for place in range(num_top))]
            values += [
                self.logprob_of.get(token, SAMPLED_LOGPROB),
                *(SAMPLED_LOGPROB - place for place in range(num_top)),
            ]
        return types_pb2.LogprobColumns(
            rows=token_ids_to_bytes([row for row, _, _ in rows]),
            counts=token_ids_to_bytes([num_top + 1 for _, _, num_top in rows]),
            token_ids=token_ids_to_bytes(ids),
            logprobs=np.asarray(values, dtype="<f4").tobytes(),
            sampled_ranks=token_ids_to_bytes([1] * len(rows)),
        )


@contextlib.asynccontextmanager
async def serve_fake_scheduler(fake: FakeScheduler, *, port: int = 0) -> AsyncIterator[str]:
    """Serve `fake` on loopback and give its address."""
    server = RpcServer(services=("pagoda.v1.Scheduler",))
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(fake, server.grpc_server)
    bound = await server.start(host="127.0.0.1", port=port)
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(grace_s=0)
