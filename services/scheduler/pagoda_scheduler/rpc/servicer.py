"""The Scheduler gRPC service: reads messages into domain types, calls the engine, writes the replies."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from pagoda_common.engine.convert import lora_adapter_from_proto, lora_adapter_to_proto
from pagoda_common.errors import InvalidRequest, NotFound, NotReady, PagodaError
from pagoda_common.metrics.tracing import sampled_traceparent
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.process.logging import log_life
from pagoda_scheduler.adapters.adapter_pool import AdapterPool
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import TRANSIENT
from pagoda_scheduler.engine.open_requests import Origin
from pagoda_scheduler.groups.weights_control import WeightsControl
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.rpc.adoption import adopted_to_proto, origin_of
from pagoda_scheduler.rpc.convert_requests import requests_from_proto
from pagoda_scheduler.rpc.outbox import DEFAULT_ACKNOWLEDGES_EVERY
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from pagoda_scheduler.rpc.sinks import GenerateSink, SessionSink

logger = logging.getLogger(__name__)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """pagoda.v1.Scheduler."""

    def __init__(
        self,
        *,
        engine: Engine,
        groups: WorkerGroups,
        state: SchedulerState,
        version: str,
        render_metrics: Callable[[], bytes] = bytes,
    ) -> None:
        """`render_metrics`: the engine's own metrics in Prometheus' text format."""
        self._engine = engine
        self._groups = groups
        self._state = state
        self._version = version
        self._render_metrics = render_metrics
        self._weights = WeightsControl(engine=engine, groups=groups)
        self._adapters = state.adapters

    async def Session(
        self, request_iterator: AsyncIterator[scheduler_pb2.FrontendMessage], context: Any
    ) -> AsyncIterator[scheduler_pb2.SchedulerMessage]:
        """One frontend's stream; when it ends, the frontend's open requests are aborted."""
        sink = SessionSink(state=self._state, on_room=self._engine.unpark)
        sink.hello(self._version)
        self._engine.sinks.add(sink)
        reader = asyncio.create_task(self._read_session(request_iterator, sink))
        try:
            async for message in sink.outbox:
                yield message
        finally:
            reader.cancel()
            self._engine.close_sink(sink)

    async def _read_session(self, messages: AsyncIterator[scheduler_pb2.FrontendMessage], sink: SessionSink) -> None:
        try:
            async for message in messages:
                for part in message.batch.messages if message.HasField("batch") else (message,):
                    self._take(part, sink)
        except PagodaError as error:
            sink.outbox.close(error)
        else:
            sink.outbox.close()

    def _take(self, message: scheduler_pb2.FrontendMessage, sink: SessionSink) -> None:
        """One message of a frontend."""
        kind = message.WhichOneof("message")
        if kind == "submit":
            try:
                self._settle_adapter(message.submit)
                sequences = requests_from_proto(
                    message.submit, sink=sink, config=self._engine.config, model_info=self._groups.model_info
                )
                origin = origin_of(message.submit)
                self._submit(message.submit, sequences, timeout_s=message.submit.timeout_s, origin=origin)
            except PagodaError as error:
                sink.reject(message.submit.request_id, error)
            else:
                sink.sequences.update((open.session_slot, open) for open in sequences if not open.is_finished)
        elif kind == "abort":
            self._engine.abort(message.abort.request_ids)
        elif kind == "stop":
            self._engine.stop([sink.sequences[slot] for slot in message.stop.slots if slot in sink.sequences])
        elif kind == "release":
            for request_id in message.release.request_ids:
                self._engine.release(request_id)
        elif kind == "acknowledgement":
            sink.outbox.acknowledge(message.acknowledgement.num_messages)
        elif kind == "hello":
            sink.outbox.is_acknowledged = message.hello.acknowledges
            sink.outbox.acknowledges_every = message.hello.acknowledges_every or DEFAULT_ACKNOWLEDGES_EVERY
            if message.hello.loras.session_epoch != self._state.session_epoch:  # else it is our own list
                self._adapters.learn(map(lora_adapter_from_proto, message.hello.loras.adapters))
            log_life(logger, "frontend %s (%s) is connected", message.hello.frontend_id, message.hello.version)
        elif kind is not None:  # None: an optional message of a later version
            raise InvalidRequest(f"unexpected message {kind}", field="message")

    async def Generate(
        self, request: scheduler_pb2.SubmitRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.TokenOutput]:
        """One request as a stream of tokens."""
        if not self._engine.is_ready and self._groups.model_info is None:
            raise NotReady(f"not ready: {self._engine.not_ready_reason}", retry_after_s=1)
        if not request.request_id:
            request.request_id = f"generate-{secrets.token_hex(8)}"
        elif request.request_id in self._engine.requests:
            raise InvalidRequest(f"request_id {request.request_id!r} is in use", field="request_id")
        num_sequences = 1 if request.HasField("pooling") else max(1, request.sampling_params.n)
        sink = GenerateSink(num_sequences=num_sequences, on_room=self._engine.unpark)
        self._settle_adapter(request)
        sequences = requests_from_proto(
            request, sink=sink, config=self._engine.config, model_info=self._groups.model_info
        )
        remaining = context.time_remaining()
        self._engine.sinks.add(sink)
        try:
            if not request.traceparent:
                request.traceparent = sampled_traceparent(context.invocation_metadata())
            self._submit(request, sequences, timeout_s=request.timeout_s or remaining or 0.0)
            async for output in sink.outbox:
                yield output
        finally:
            self._engine.close_sink(sink)

    def _settle_adapter(self, message: scheduler_pb2.SubmitRequest) -> None:
        """Complete the adapter in a request's message, if it names one.

        Raises:
            NotFound: the adapter has only a name, which is not listed.
            InvalidRequest: adapters are off.
        """
        if not message.HasField("lora"):
            return
        if not self._adapters.is_on:
            raise InvalidRequest(f"lora is {message.lora.name!r}, adapters need --enable-lora", field="lora")
        if not message.lora.path:
            message.lora.CopyFrom(lora_adapter_to_proto(self._adapters.find(message.lora.name)))

    def _submit(
        self,
        message: scheduler_pb2.SubmitRequest,
        sequences: list[Request],
        *,
        timeout_s: float,
        origin: Origin | None = None,
    ) -> None:
        """Submit a request to the engine, and trace it if it is sampled.

        Raises:
            PagodaError: as in Engine.submit.
        """
        traces = self._engine.traces
        if traces is None or not message.traceparent:
            self._engine.submit(sequences, timeout_s=timeout_s, origin=origin)
            return
        traces.begin(sequences, message.traceparent)
        try:
            self._engine.submit(sequences, timeout_s=timeout_s, origin=origin)
        except PagodaError:
            traces.forget(sequences)
            raise

    async def Abort(self, request: scheduler_pb2.AbortRequest, context: Any) -> scheduler_pb2.AbortResponse:
        """Abort by id."""
        self._engine.abort(request.request_ids)
        return scheduler_pb2.AbortResponse()

    async def GetLoad(self, request: scheduler_pb2.GetLoadRequest, context: Any) -> types_pb2.EngineLoad:
        """The current load."""
        return self._state.load()

    async def RegisterWorker(
        self, request_iterator: AsyncIterator[scheduler_pb2.WorkerRegistration], context: Any
    ) -> AsyncIterator[scheduler_pb2.RegisterWorkerResponse]:
        """A worker is registered for as long as its stream is open."""
        yield scheduler_pb2.RegisterWorkerResponse(session_epoch=self._state.session_epoch, can_leave=True)
        await self._groups.register(request_iterator)

    async def GetModelInfo(
        self, request: scheduler_pb2.GetSchedulerModelInfoRequest, context: Any
    ) -> types_pb2.ModelInfo:
        """The loaded model."""
        if self._groups.model_info is None:
            raise NotReady(f"not ready: {self._engine.not_ready_reason}", retry_after_s=1)
        return self._groups.model_info

    async def ResetPrefixCache(
        self, request: scheduler_pb2.ResetPrefixCacheRequest, context: Any
    ) -> scheduler_pb2.ResetPrefixCacheResponse:
        """Drop every cached prefix."""
        count = sum(core.scheduler.kv.reset_cache() for core in self._engine.cores)
        return scheduler_pb2.ResetPrefixCacheResponse(num_blocks=count)

    async def Drain(self, request: scheduler_pb2.DrainRequest, context: Any) -> scheduler_pb2.DrainResponse:
        """Refuse new requests and wait for the open ones."""
        await self._engine.drain(request.timeout_s)
        unfinished = sum(len(open_request.unfinished) for open_request in self._engine.requests.values())
        return scheduler_pb2.DrainResponse(num_unfinished=unfinished)

    async def Adopt(self, request: scheduler_pb2.AdoptRequest, context: Any) -> scheduler_pb2.AdoptResponse:
        """The open requests of a lost frontend, for adoption."""
        found = self._engine.adopt(request.resume_key)
        if not found:
            raise NotFound(f"resume_key {request.resume_key!r} is unknown, or its lease is over", field="resume_key")
        return scheduler_pb2.AdoptResponse(requests=map(adopted_to_proto, found))

    async def GetMetrics(
        self, request: scheduler_pb2.GetMetricsRequest, context: Any
    ) -> scheduler_pb2.GetMetricsResponse:
        """Metrics of steps: their durations and sizes."""
        return scheduler_pb2.GetMetricsResponse(text=self._render_metrics())

    async def GetState(self, request: scheduler_pb2.GetStateRequest, context: Any) -> scheduler_pb2.GetStateResponse:
        """Open sequences and known workers."""
        response = scheduler_pb2.GetStateResponse(load=self._state.load())
        for open_request in self._engine.requests.values():
            for sequence in open_request.unfinished:
                response.sequences.add(
                    request_id=sequence.request_id,
                    index=sequence.index,
                    status=sequence.status.value,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    num_output_tokens=len(sequence.output_token_ids),
                    num_computed_tokens=sequence.num_computed_tokens,
                    num_blocks=sequence.num_blocks,
                )
        for group in self._groups.groups.values():
            for rank in group.members:
                response.workers.add(identity=rank.identity, state=group.state, sleep_level=group.sleep_level)
        return response

    async def Sleep(self, request: scheduler_pb2.SleepRequest, context: Any) -> scheduler_pb2.SleepResponse:
        """Put groups to sleep."""
        slept = await self._weights.sleep(
            level=request.level or 1,
            number=request.group if request.HasField("group") else None,
            is_abort=request.mode == scheduler_pb2.SLEEP_MODE_ABORT,
        )
        return scheduler_pb2.SleepResponse(
            num_groups=slept.num_groups, freed_bytes=slept.freed_bytes, seconds=slept.seconds
        )

    async def WakeUp(self, request: scheduler_pb2.WakeUpRequest, context: Any) -> scheduler_pb2.WakeUpResponse:
        """Wake up sleeping groups."""
        number = request.group if request.HasField("group") else None
        woken = await self._weights.wake_up(tags=request.tags, number=number)
        return scheduler_pb2.WakeUpResponse(num_groups=woken.num_groups, seconds=woken.seconds)

    async def IsSleeping(
        self, request: scheduler_pb2.IsSleepingRequest, context: Any
    ) -> scheduler_pb2.IsSleepingResponse:
        """Whether the engine sleeps, and which groups do."""
        level = self._state.load().sleep_level
        response = scheduler_pb2.IsSleepingResponse(is_sleeping=level > 0, level=level)
        for number, group in sorted(self._groups.groups.items()):
            response.groups.add(group=number, level=group.sleep_level)
        return response

    async def ReloadWeights(
        self, request: scheduler_pb2.ReloadWeightsRequest, context: Any
    ) -> scheduler_pb2.ReloadWeightsResponse:
        """Serve other weights from now on."""
        reloaded = await self._weights.reload(
            model=request.model,
            revision=request.revision or None,
            number=request.group if request.HasField("group") else None,
        )
        return scheduler_pb2.ReloadWeightsResponse(
            num_groups=reloaded.num_groups, seconds=reloaded.seconds, pause_s=reloaded.pause_s
        )

    async def AddLora(self, request: scheduler_pb2.AddLoraRequest, context: Any) -> scheduler_pb2.AddLoraResponse:
        """Load an adapter; answers when the serving groups have loaded it."""
        asked = lora_adapter_from_proto(request.adapter)
        adapter = self._adapters.candidate(asked, load_inplace=request.load_inplace)
        await self._read_by_all(adapter)
        before = self._adapters.get(adapter.name)
        self._adapters.put(adapter)
        for pool in self._pools():
            if before is not None and before.key != adapter.key:
                pool.forget(before)
        return scheduler_pb2.AddLoraResponse(adapter=lora_adapter_to_proto(adapter))

    async def _read_by_all(self, adapter: LoraAdapter) -> None:
        """Raises PagodaError if a group cannot use the adapter; a group that is lost meanwhile loads it later."""
        answers = await asyncio.gather(
            *(core.load_adapter(adapter) for core in self._engine.cores), return_exceptions=True
        )
        for answer in answers:
            is_lost = isinstance(answer, asyncio.CancelledError) or (
                isinstance(answer, PagodaError) and answer.code in TRANSIENT
            )
            if isinstance(answer, BaseException) and not is_lost:
                raise answer

    def _pools(self) -> list[AdapterPool]:
        return [core.adapters for core in self._engine.cores if core.adapters is not None]

    async def RemoveLora(
        self, request: scheduler_pb2.RemoveLoraRequest, context: Any
    ) -> scheduler_pb2.RemoveLoraResponse:
        """Unload an adapter: its new requests are refused."""
        adapter = self._adapters.remove(request.name)
        for pool in self._pools():
            pool.forget(adapter)
        return scheduler_pb2.RemoveLoraResponse()

    async def PinLora(self, request: scheduler_pb2.PinLoraRequest, context: Any) -> scheduler_pb2.PinLoraResponse:
        """Pin an adapter in memory, or unpin it."""
        adapter = self._adapters.pin(request.name, is_pinned=request.is_pinned)
        for pool in self._pools():
            pool.pin(adapter, is_pinned=request.is_pinned)
        if request.is_pinned:
            await self._read_by_all(adapter)
        return scheduler_pb2.PinLoraResponse()

    async def ListLoras(self, request: scheduler_pb2.ListLorasRequest, context: Any) -> scheduler_pb2.ListLorasResponse:
        """The adapters that requests may name."""
        return scheduler_pb2.ListLorasResponse(adapters=map(lora_adapter_to_proto, self._adapters.listed()))
