"""WorkerServicer: pagoda.v1.Worker over a Worker core that computes on a separate thread."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pagoda.v1 import scheduler_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.engine.convert import (
    lora_adapter_from_proto,
    lora_adapter_to_proto,
    structured_outputs_from_proto,
    weights_source_from_proto,
    weights_source_to_proto,
)
from pagoda_common.errors import Code, InvalidRequest, PagodaError, Superseded
from pagoda_worker.loader.model_facts import ModelFacts
from pagoda_worker.lora.store import AdapterStore
from pagoda_worker.metrics import WorkerMetrics
from pagoda_worker.rpc.convert import (
    engine_config_from_proto,
    model_facts_to_proto,
    step_input_from_proto,
    step_output_to_proto,
)
from pagoda_worker.rpc.execute_stream import ExecuteStream, StepAnswer
from pagoda_worker.rpc.fence import Fence, StepHistory
from pagoda_worker.rpc.hold_constraint import compiled
from pagoda_worker.steps.pipeline import QueuedStep, StepPipeline
from pagoda_worker.steps.step import StepInput, StepOutput
from pagoda_worker.worker import Worker

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

PROGRESS_PERIOD_S = 0.2
"""Seconds between two messages of LoadModel."""
STUCK_AFTER_S = 10.0
"""Seconds after which a step that its scheduler has given up counts as stuck."""
EXIT_STUCK = 70
"""Exit code (EX_SOFTWARE) of a worker that can no longer compute."""


def _end_process() -> None:
    """Exit, so that the supervisor starts a new process: the stuck thread cannot be ended otherwise."""
    os._exit(EXIT_STUCK)


def _nothing() -> None:
    """Run on the model thread to wait for its current work."""


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Every RPC reads a message, calls the core on the model thread and writes the reply."""

    def __init__(
        self,
        *,
        worker: Worker,
        set_serving: Callable[[bool], Awaitable[None]],
        on_stuck: Callable[[], None] = _end_process,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        """`set_serving`: called with whether the Execute stream would be answered; `on_stuck`: called if a step never
        ends."""
        self.fence = Fence()
        self._worker = worker
        self._set_serving = set_serving
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._lora_reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self._history: StepHistory[StepAnswer] = StepHistory()
        self._pipeline = StepPipeline(worker=worker, submit=self._thread.submit)
        self._stream: ExecuteStream | None = None
        self._load: asyncio.Task[ModelFacts] | None = None
        self._loaded_bytes = (0, 0)
        self._is_closed = False
        self._on_stuck = on_stuck
        self._metrics = metrics

    @property
    def last_step(self) -> int:
        """Number of the latest accepted step."""
        return self._history.last_step

    def describe_weights(self, identity: scheduler_pb2.WorkerIdentity) -> None:
        """Add to the identity what an earlier scheduler has ordered, for a new one."""
        identity.sleep_level = self._worker.sleep_level
        identity.ClearField("weights")
        if self._worker.weights is not None:
            identity.weights.CopyFrom(weights_source_to_proto(self._worker.weights))

    async def close(self) -> None:
        """Wait for the running step; abandon a running load."""
        self._is_closed = True
        self._worker.parallel.abandon()
        for thread in (self._reader, self._lora_reader, self._thread):
            await asyncio.to_thread(thread.shutdown, wait=True, cancel_futures=True)
        await asyncio.to_thread(self._pipeline.drain)

    async def _on_model_thread(self, function: Callable[..., Result], *args: Any) -> Result:
        def run() -> Result:
            self._pipeline.drain()
            return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def InitDevice(self, request: worker_pb2.InitDeviceRequest, context: Any) -> worker_pb2.InitDeviceResponse:
        """Fence older schedulers and claim the device."""
        config = engine_config_from_proto(request.config)
        is_new = request.session_epoch > self.fence.session_epoch
        self.fence.claim(request.session_epoch)
        if is_new:
            self._replace_stream(None, "a newer scheduler took over")
            await self._set_serving(False)
        self._worker.parallel.abandon()
        await self._wait_for_step()
        weights = weights_source_from_proto(request.weights) if request.HasField("weights") else None
        info = await self._on_model_thread(
            lambda: self._worker.init_device(
                config,
                weights,
                rendezvous=request.rendezvous_address,
                takes_cache_groups=request.config.takes_cache_groups,
            )
        )
        return worker_pb2.InitDeviceResponse(
            worker_incarnation=self.fence.incarnation,
            device=info.description,
            total_memory_bytes=info.total_memory_bytes,
            rendezvous_address=self._worker.parallel.address,
        )

    async def _wait_for_step(self) -> None:
        """A new scheduler starts: wait for the running step. A step that never ends keeps the model thread."""
        if not self._pipeline.is_running:
            return
        try:
            async with asyncio.timeout(STUCK_AFTER_S):
                await self._on_model_thread(_nothing)
        except TimeoutError:
            logger.critical("a step has not ended %g s after the scheduler gave it up", STUCK_AFTER_S)
            self._on_stuck()

    async def LoadModel(
        self, request: worker_pb2.LoadModelRequest, context: Any
    ) -> AsyncIterator[worker_pb2.LoadModelProgress]:
        """Load the weights, unless already loaded. A second caller follows the running load."""
        self.fence.check(request.session_epoch)
        if self._load is None or self._load.done():
            self._loaded_bytes = (0, 0)
            self._load = asyncio.create_task(self._on_model_thread(self._worker.load_model, self._on_progress))
        async for progress in self._follow(self._load):
            yield progress
        self._load.result()
        yield self._all_loaded()

    async def _follow(self, work: asyncio.Future[Any]) -> AsyncIterator[worker_pb2.LoadModelProgress]:
        """Progress reports until `work` is done."""
        while not work.done():
            await asyncio.wait({work}, timeout=PROGRESS_PERIOD_S)
            if not work.done():
                loaded, total = self._loaded_bytes
                yield worker_pb2.LoadModelProgress(loaded_bytes=loaded, total_bytes=total)

    def _all_loaded(self) -> worker_pb2.LoadModelProgress:
        info = self._model_info()
        assert info is not None, "it has just been loaded"
        total = self._loaded_bytes[1]  # 0: nothing had to be read
        return worker_pb2.LoadModelProgress(loaded_bytes=total, total_bytes=total, model_info=info)

    def _model_info(self) -> types_pb2.ModelInfo | None:
        if self._worker.facts is None:
            return None
        layout = self._worker.cache_layout
        info = model_facts_to_proto(self._worker.facts, () if layout.is_plain else layout.all_groups)
        if self._worker.weights is not None:
            info.weights.CopyFrom(weights_source_to_proto(self._worker.weights))
        return info

    def _on_progress(self, loaded: int, total: int) -> None:
        if self._is_closed:
            raise PagodaError("the worker is shutting down")
        self._loaded_bytes = (loaded, total)

    async def DetermineNumAvailableBlocks(
        self, request: worker_pb2.DetermineNumAvailableBlocksRequest, context: Any
    ) -> worker_pb2.DetermineNumAvailableBlocksResponse:
        """The number of KV-cache blocks that fit. The measurement drops the current cache."""
        self.fence.check(request.session_epoch)
        await self._set_serving(False)
        blocks = await self._on_model_thread(self._worker.determine_num_available_blocks)
        return worker_pb2.DetermineNumAvailableBlocksResponse(
            num_blocks=blocks.num_blocks,
            num_cpu_blocks=blocks.num_cpu_blocks,
            block_bytes=blocks.block_bytes,
            num_state_snapshots=blocks.num_state_snapshots,
            num_cpu_state_snapshots=blocks.num_cpu_state_snapshots,
            state_bytes=blocks.state_bytes,
        )

    async def InitializeCache(
        self, request: worker_pb2.InitializeCacheRequest, context: Any
    ) -> worker_pb2.InitializeCacheResponse:
        """Allocate the KV cache; the next step is 1."""
        self.fence.check(request.session_epoch)
        self._replace_stream(None, "the cache was initialized again")
        self._history.forget()
        swap_block_ns = await self._on_model_thread(self._initialize_cache, request)
        self.fence.check(request.session_epoch)
        await self._set_serving(True)
        return worker_pb2.InitializeCacheResponse(swap_block_ns=swap_block_ns)

    def _initialize_cache(self, request: worker_pb2.InitializeCacheRequest) -> int:
        return self._worker.initialize_cache(
            num_blocks=request.num_blocks,
            num_cpu_blocks=request.num_cpu_blocks,
            num_state_snapshots=request.num_state_snapshots,
            num_cpu_state_snapshots=request.num_cpu_state_snapshots,
        )

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteModelRequest], context: Any
    ) -> AsyncIterator[worker_pb2.SamplerOutput]:
        """The hot path: steps are read while others run, and answers are sent in order."""
        stream = ExecuteStream()
        self._replace_stream(stream, "a newer Execute stream took over")
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (answer := await stream.next()) is not None:
                yield answer
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[worker_pb2.ExecuteModelRequest], stream: ExecuteStream) -> None:
        try:
            await stream.has_room()
            async for request in requests:
                if stream is not self._stream:
                    return  # its end is on its way
                stream.put(self._take_on(request))
                await stream.has_room()
            stream.end()
        except Exception as error:
            stream.end(error)

    def _replace_stream(self, stream: ExecuteStream | None, reason: str) -> None:
        if self._stream is not None:
            self._stream.end(Superseded(reason))
        self._stream = stream

    async def ExecuteModel(self, request: worker_pb2.ExecuteModelRequest, context: Any) -> worker_pb2.SamplerOutput:
        """One step, unary."""
        answer, waiting = self._take_on(request), asyncio.Event()
        answer.when_there(waiting.set)
        await waiting.wait()
        return answer.result()

    def _take_on(self, request: worker_pb2.ExecuteModelRequest) -> StepAnswer:
        """The answer of a step, which may still be pending.

        Raises:
            StaleEpoch: the message is from another scheduler, for another process, or out of turn.
            InvalidRequest: the message cannot be read; the step is not accepted.
        """
        self.fence.check(request.session_epoch)
        self.fence.check_incarnation(request.worker_incarnation)
        answer = self._history.repeated(request.step)
        if answer is None:
            # Handed over before anything is awaited: steps reach the model thread in the order they arrived.
            step = step_input_from_proto(request, arrived_ns=time.perf_counter_ns())
            self._worker.expect(step)
            answer = StepAnswer()
            self._pipeline.put(self._queued(step, request, answer, asyncio.get_running_loop()))
            self._history.add(request.step, answer)
        return answer

    def _queued(
        self,
        step: StepInput,
        request: worker_pb2.ExecuteModelRequest,
        answer: StepAnswer,
        loop: asyncio.AbstractEventLoop,
    ) -> QueuedStep:
        """A step whose result is handled on the event loop, while the model thread runs the next step."""

        def give(output: StepOutput) -> None:
            loop.call_soon_threadsafe(self._tell, answer, step, request, output)

        def fail(error: Exception) -> None:
            loop.call_soon_threadsafe(answer.fail, error)

        return QueuedStep(step, give, fail)

    def _tell(
        self,
        answer: StepAnswer,
        step: StepInput,
        request: worker_pb2.ExecuteModelRequest,
        output: StepOutput,
    ) -> None:
        try:
            message = step_output_to_proto(output, request)
        except Exception as error:
            answer.fail(error)
            raise
        answer.give(message)
        if self._metrics is not None:
            self._metrics.observe(step, output)

    async def Sleep(self, request: worker_pb2.WorkerSleepRequest, context: Any) -> worker_pb2.WorkerSleepResponse:
        """Put the worker to sleep, which frees memory."""
        self._check(request.session_epoch, request.worker_incarnation)
        if request.level not in (1, 2):
            raise InvalidRequest(f"level is {request.level}, must be 1 or 2", field="level")
        await self._end_serving("the worker was put to sleep")
        freed = await self._on_model_thread(self._worker.sleep, request.level)
        logger.info("asleep at level %d, %.0f MiB freed", request.level, freed / 2**20)
        return worker_pb2.WorkerSleepResponse(freed_bytes=freed)

    async def WakeUp(self, request: worker_pb2.WorkerWakeUpRequest, context: Any) -> worker_pb2.WorkerWakeUpResponse:
        """Wake the worker up."""
        self._check(request.session_epoch, request.worker_incarnation)
        started = time.monotonic()
        await self._on_model_thread(lambda: self._worker.wake_up(weights_only=request.weights_only))
        return worker_pb2.WorkerWakeUpResponse(seconds=time.monotonic() - started)

    async def PrepareWeights(
        self, request: worker_pb2.PrepareWeightsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.LoadModelProgress]:
        """Read other weights concurrently with steps."""
        self._check(request.session_epoch, request.worker_incarnation)
        source = weights_source_from_proto(request.weights) if request.HasField("weights") else None
        async for progress in self._prepare(source):
            yield progress
        yield self._all_loaded()

    async def _prepare(self, source: WeightsSource | None) -> AsyncIterator[worker_pb2.LoadModelProgress]:
        self._loaded_bytes = (0, 0)
        reading = asyncio.get_running_loop().run_in_executor(
            self._reader, self._worker.prepare_weights, source, self._on_progress
        )
        reading.add_done_callback(_hear)
        async for progress in self._follow(reading):
            yield progress
        reading.result()

    async def ReloadWeights(
        self, request: worker_pb2.WorkerReloadWeightsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.LoadModelProgress]:
        """Change to other weights."""
        self._check(request.session_epoch, request.worker_incarnation)
        source = weights_source_from_proto(request.weights)
        if not self._worker.has_prepared(source):
            async for progress in self._prepare(source):
                yield progress
            self._check(request.session_epoch, request.worker_incarnation)
        await self._end_serving("other weights take the place of those in use")
        await self._on_model_thread(self._worker.reload_weights, source, self._on_progress)
        yield self._all_loaded()

    async def HoldConstraint(
        self, request: worker_pb2.HoldConstraintRequest, context: Any
    ) -> AsyncIterator[worker_pb2.HoldConstraintResponse]:
        """Compile a constraint concurrently with steps, and keep it until the caller ends the call."""
        self._check(request.session_epoch, request.worker_incarnation)
        params = structured_outputs_from_proto(request.structured_output)
        kept = self._worker.grammars
        with kept.held(params):
            await compiled(kept, params)
            yield worker_pb2.HoldConstraintResponse()
            await asyncio.Event().wait()  # until the call is cancelled

    async def AddLora(self, request: worker_pb2.WorkerAddLoraRequest, context: Any) -> worker_pb2.WorkerAddLoraResponse:
        """Load an adapter concurrently with steps."""
        store = self._adapters(request.session_epoch, request.worker_incarnation)
        if request.number < 1:
            raise InvalidRequest(f"number is {request.number}, must be at least 1", field="number")
        name = lora_adapter_from_proto(request.adapter)
        loop = asyncio.get_running_loop()
        adapter = await loop.run_in_executor(self._lora_reader, store.load, request.number, name)
        return worker_pb2.WorkerAddLoraResponse(num_bytes=adapter.num_bytes, rank=adapter.rank)

    async def RemoveLora(
        self, request: worker_pb2.WorkerRemoveLoraRequest, context: Any
    ) -> worker_pb2.WorkerRemoveLoraResponse:
        """Drop an adapter."""
        store = self._adapters(request.session_epoch, request.worker_incarnation)
        await self._on_model_thread(store.remove, request.number)
        return worker_pb2.WorkerRemoveLoraResponse()

    async def PinLora(self, request: worker_pb2.WorkerPinLoraRequest, context: Any) -> worker_pb2.WorkerPinLoraResponse:
        """Pin an adapter on the device, or unpin it."""
        store = self._adapters(request.session_epoch, request.worker_incarnation)
        store.pin(request.number, is_pinned=request.is_pinned)
        return worker_pb2.WorkerPinLoraResponse()

    async def ListLoras(
        self, request: worker_pb2.WorkerListLorasRequest, context: Any
    ) -> worker_pb2.WorkerListLorasResponse:
        """The adapters in memory."""
        response = worker_pb2.WorkerListLorasResponse()
        listed = [] if self._worker.adapters is None else self._worker.adapters.listed()
        for number, adapter, is_on_device in listed:
            response.loras.add(
                number=number,
                adapter=lora_adapter_to_proto(adapter.name),
                num_bytes=adapter.num_bytes,
                is_on_device=is_on_device,
            )
        return response

    def _adapters(self, session_epoch: int, worker_incarnation: int) -> AdapterStore:
        self._check(session_epoch, worker_incarnation)
        if self._worker.adapters is None:
            raise PagodaError("the model is not loaded, or without adapters", code=Code.FAILED_PRECONDITION)
        return self._worker.adapters

    def _check(self, session_epoch: int, worker_incarnation: int) -> None:
        self.fence.check(session_epoch)
        self.fence.check_incarnation(worker_incarnation)

    async def _end_serving(self, reason: str) -> None:
        """Accept no further steps until InitializeCache."""
        self._replace_stream(None, reason)
        await self._set_serving(False)
        await self._wait_for_step()

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.GetStatusResponse:
        """State for operators."""
        response = worker_pb2.GetStatusResponse(
            worker_incarnation=self.fence.incarnation,
            session_epoch=self.fence.session_epoch,
            state=self._worker.state,
            last_step=self._history.last_step,
            num_blocks=self._worker.num_blocks,
            sleep_level=self._worker.sleep_level,
        )
        if (info := self._model_info()) is not None:
            response.model_info.CopyFrom(info)
        return response


def _hear(answer: asyncio.Future[Any]) -> None:
    """Consume a failure that nothing waits for."""
    if not answer.cancelled():
        answer.exception()
