"""A worker without a model: the next token is the last one plus one. Keeps slots exactly as the contract says."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from pagoda_common.rpc.service import RpcServer, connect


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Serves pagoda.v1.Worker on a free port and registers itself.

    Switches: `delay_s` per step and `delay_per_token_s` for each of its tokens; `fail_at_step` ends the stream with
    INTERNAL once; `hang_at_step` never answers it, once; `bad_tokens`, last tokens whose sequence becomes
    a bad slot; `crash_tokens`, last tokens whose sequence ends the stream whenever it is in a step (`num_crashes`).

    Weights called "plus-N" make the next token the last one plus N; "plus-N-broken" can be prepared and no more; others
    do not exist. `calls` has the names of the calls beside Execute. A rank but 0 only acknowledges steps.
    """

    def __init__(
        self,
        *,
        max_model_len: int = 4096,
        num_blocks: int = 10_000,
        eos_token_ids: tuple[int, ...] = (),
        vocab_size: int = 1_000_000,
        rank: int = 0,
        world_size: int = 1,
        capabilities: tuple[str, ...] = (),
        embedding_size: int = 2,
    ) -> None:
        """`capabilities`: told to the scheduler; of the draft tokens that a step allows, `num_right` are right. An
        embedding is the number of tokens, the last one, and zeros."""
        self.embedding_size = embedding_size
        self.rank = rank
        self.world_size = world_size
        self.capabilities = capabilities
        self.num_right = 0
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.eos_token_ids = eos_token_ids
        self.incarnation = secrets.randbits(63) | 1
        self.delay_s = 0.0
        self.delay_per_token_s = 0.0
        self.fail_at_step = 0
        self.hang_at_step = 0
        self.crash_tokens: set[int] = set()
        self.num_crashes = 0
        self.has_heartbeats = True
        self.refuses_sleep = False
        self.hangs_on_reload = False
        self.bad_tokens: set[int] = set()
        self.requests: list[worker_pb2.ExecuteModelRequest] = []
        """Every step received, when `keep_requests` is set."""
        self.keep_requests = False
        self.num_loads = 0
        self.calls: list[str] = []
        self.sleep_level = 0
        self.weights = types_pb2.WeightsSource(model="plus-1")
        self.epoch = 0
        self.num_registrations = 0
        self.rendezvous: list[str] = []
        """Meeting places that InitDevice named."""
        self.address = ""
        self.local_address = ""
        self.callers: set[str] = set()
        """Schemes of the addresses that InitDevice came from, such as ipv4."""
        self.compiles = asyncio.Event()
        """While it is not set, no constraint is compiled."""
        self.compiles.set()
        self.bad_regexes: set[str] = set()
        self.asked_regexes: list[str] = []
        """Constraints that were to be compiled, in their order."""
        self.held_regexes: set[str] = set()
        """Those that are held."""
        self._server = RpcServer(services=("pagoda.v1.Worker",))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server.grpc_server)
        self._registration: asyncio.Task[None] | None = None
        self._call: Any = None
        self._leaving: float | None = None
        self._forget(1)

    async def start(
        self, scheduler_address: str, *, group: int | None = None, local_address: str | None = None
    ) -> None:
        """Listen, at an abstract socket as well if one is given, and register with the scheduler."""
        port = await self._server.start(host="127.0.0.1", port=0, local_address=local_address)
        self.local_address = local_address or self.local_address
        self.address = f"127.0.0.1:{port}"
        self._registration = asyncio.create_task(self._register(scheduler_address, group))

    async def stop(self) -> None:
        """Vanish at once."""
        if self._registration is not None:
            self._registration.cancel()
            await asyncio.wait([self._registration])
        await self._server.stop(grace_s=0)

    def drop_registration(self) -> None:
        """Break the registration alone, as a connection may; the worker registers again."""
        assert self._call is not None
        self._call.cancel()

    async def leave(self, timeout_s: float) -> None:
        """Tell the scheduler of the end, and return when the worker may go; it is not registered any more."""
        self._leaving = timeout_s
        assert self._registration is not None
        await self._registration

    async def _register(self, scheduler_address: str, group: int | None) -> None:
        async def messages() -> AsyncIterator[scheduler_pb2.WorkerRegistration]:
            identity = scheduler_pb2.WorkerIdentity(
                address=self.address,
                rank=self.rank,
                world_size=self.world_size,
                device="fake",
                incarnation=self.incarnation,
                local_address=self.local_address,
            )
            identity.sleep_level = self.sleep_level
            identity.capabilities.extend(self.capabilities)
            if self.weights.version:
                identity.weights.CopyFrom(self.weights)
            if group is not None:
                identity.group = group
            yield scheduler_pb2.WorkerRegistration(identity=identity)
            yield scheduler_pb2.WorkerRegistration(heartbeat=scheduler_pb2.WorkerHeartbeat())
            for tick in itertools.count(1):
                await asyncio.sleep(0.05)
                if self._leaving is not None:
                    break
                if self.has_heartbeats and tick % 20 == 0:
                    yield scheduler_pb2.WorkerRegistration(heartbeat=scheduler_pb2.WorkerHeartbeat())
            leaving = scheduler_pb2.WorkerLeaving(timeout_s=self._leaving or 0.0)
            yield scheduler_pb2.WorkerRegistration(leaving=leaving)
            await asyncio.Event().wait()

        async with connect(scheduler_address) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            while True:
                try:
                    self._call = stub.RegisterWorker(messages(), wait_for_ready=True)
                    async for _ in self._call:
                        self.num_registrations += 1
                    if self._leaving is not None:
                        return
                except (grpc.RpcError, asyncio.CancelledError):
                    if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                        raise
                    await asyncio.sleep(0.05)

    def _forget(self, max_num_seqs: int) -> None:
        self._last = np.zeros(max_num_seqs, dtype=np.uint32)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._is_pooled = np.zeros(max_num_seqs, dtype=np.bool_)
        self._slots: npt.NDArray[Any] = np.zeros(0, dtype=np.uint16)

    # pagoda.v1.Worker.

    async def InitDevice(self, request: worker_pb2.InitDeviceRequest, context: Any) -> worker_pb2.InitDeviceResponse:
        self.callers.add(context.peer().partition(":")[0])
        if request.session_epoch < self.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"session epoch must be at least {self.epoch}")
        self.epoch = request.session_epoch
        self._asked = request.weights if request.HasField("weights") else types_pb2.WeightsSource(model="plus-1")
        self._forget(request.config.max_num_seqs)
        self.rendezvous.append(request.rendezvous_address)
        is_leader = self.rank == 0 and self.world_size > 1
        return worker_pb2.InitDeviceResponse(
            worker_incarnation=self.incarnation,
            device="fake",
            rendezvous_address=f"here:{len(self.rendezvous)}" if is_leader else "",
        )

    async def LoadModel(
        self, request: worker_pb2.LoadModelRequest, context: Any
    ) -> AsyncIterator[worker_pb2.LoadModelProgress]:
        self.num_loads += 1
        await self._check_weights(self._asked.model, context)
        self.weights, self.sleep_level = self._asked, 0
        info = types_pb2.ModelInfo(
            model="fake",
            architecture="FakeForCausalLM",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            embedding_size=self.embedding_size,
        )
        yield worker_pb2.LoadModelProgress(loaded_bytes=1, total_bytes=1, model_info=info)

    async def _check_weights(self, name: str, context: Any) -> None:
        if not name.removeprefix("plus-").isdigit():
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"model {name!r} is not a directory")

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.GetStatusResponse:
        info = types_pb2.ModelInfo(model="fake") if self.num_loads else None
        return worker_pb2.GetStatusResponse(session_epoch=self.epoch, model_info=info)

    async def Sleep(self, request: worker_pb2.WorkerSleepRequest, context: Any) -> worker_pb2.WorkerSleepResponse:
        assert (request.session_epoch, request.worker_incarnation) == (self.epoch, self.incarnation)
        self.calls.append(f"sleep {request.level}")
        if self.refuses_sleep:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "host memory is full")
        self.sleep_level = request.level
        return worker_pb2.WorkerSleepResponse(freed_bytes=1000)

    async def WakeUp(self, request: worker_pb2.WorkerWakeUpRequest, context: Any) -> worker_pb2.WorkerWakeUpResponse:
        assert (request.session_epoch, request.worker_incarnation) == (self.epoch, self.incarnation)
        self.calls.append("wake weights" if request.weights_only else "wake")
        if self.refuses_sleep:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the checkpoint is gone")
        if not request.weights_only:
            self.sleep_level = 0
        return worker_pb2.WorkerWakeUpResponse()

    async def PrepareWeights(
        self, request: worker_pb2.PrepareWeightsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.LoadModelProgress]:
        assert (request.session_epoch, request.worker_incarnation) == (self.epoch, self.incarnation)
        self.calls.append(f"prepare {request.weights.model}" if request.HasField("weights") else "forget")
        if request.HasField("weights"):
            await self._check_weights(request.weights.model.removesuffix("-broken"), context)
        yield worker_pb2.LoadModelProgress(loaded_bytes=1, total_bytes=1)

    async def ReloadWeights(
        self, request: worker_pb2.WorkerReloadWeightsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.LoadModelProgress]:
        assert (request.session_epoch, request.worker_incarnation) == (self.epoch, self.incarnation)
        self.calls.append(f"reload {request.weights.model}")
        if self.hangs_on_reload:
            await asyncio.Event().wait()
        await self._check_weights(request.weights.model, context)
        self.weights = request.weights
        yield worker_pb2.LoadModelProgress(loaded_bytes=1, total_bytes=1)

    async def DetermineNumAvailableBlocks(
        self, request: worker_pb2.DetermineNumAvailableBlocksRequest, context: Any
    ) -> worker_pb2.DetermineNumAvailableBlocksResponse:
        return worker_pb2.DetermineNumAvailableBlocksResponse(num_blocks=self.num_blocks, block_bytes=1)

    async def InitializeCache(
        self, request: worker_pb2.InitializeCacheRequest, context: Any
    ) -> worker_pb2.InitializeCacheResponse:
        return worker_pb2.InitializeCacheResponse()

    async def HoldConstraint(
        self, request: worker_pb2.HoldConstraintRequest, context: Any
    ) -> AsyncIterator[worker_pb2.HoldConstraintResponse]:
        assert (request.session_epoch, request.worker_incarnation) == (self.epoch, self.incarnation)
        regex = request.structured_output.regex
        self.asked_regexes.append(regex)
        await self.compiles.wait()
        if regex in self.bad_regexes:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"structured_outputs.regex: {regex} is bad")
        self.held_regexes.add(regex)
        try:
            yield worker_pb2.HoldConstraintResponse()
            await asyncio.Event().wait()
        finally:
            self.held_regexes.discard(regex)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteModelRequest], context: Any
    ) -> AsyncIterator[worker_pb2.SamplerOutput]:
        async for request in request_iterator:
            if self.keep_requests:
                self.requests.append(request)
            if self.fail_at_step and request.step >= self.fail_at_step:
                self.fail_at_step = 0
                await context.abort(grpc.StatusCode.INTERNAL, "the forward pass failed")
            if self.hang_at_step and request.step >= self.hang_at_step:
                self.hang_at_step = 0
                await asyncio.Event().wait()
            if self.crash_tokens & self._last_tokens(request):
                self.num_crashes += 1
                await context.abort(grpc.StatusCode.INTERNAL, "the forward pass crashed")
            delay_s = self.delay_s + self.delay_per_token_s * self._num_tokens_of(request)
            if delay_s:
                await asyncio.sleep(delay_s)
            yield self.execute(request)

    def _last_tokens(self, request: worker_pb2.ExecuteModelRequest) -> set[int]:
        """Last known tokens of the sequences in a step that has not run yet."""
        entering = {
            new.slot: int(np.frombuffer(new.prompt_token_ids + new.output_token_ids, dtype="<u4")[-1])
            for new in request.new_requests
        }
        slots = np.frombuffer(request.slots, dtype="<u2") if request.slots else self._slots
        return {entering.get(slot, int(self._last[slot])) for slot in slots.tolist()}

    def _num_tokens_of(self, request: worker_pb2.ExecuteModelRequest) -> int:
        if not request.num_scheduled_tokens:
            return request.num_seqs
        return int(np.frombuffer(request.num_scheduled_tokens, dtype="<u4").sum())

    def execute(self, request: worker_pb2.ExecuteModelRequest) -> worker_pb2.SamplerOutput:
        """One step, vectorised over the batch."""
        for new in request.new_requests:
            log = np.frombuffer(new.prompt_token_ids + new.output_token_ids, dtype="<u4")
            self._last[new.slot], self._num_tokens[new.slot] = log[-1], len(log)
            self._computed[new.slot] = new.num_computed_tokens
            self._is_pooled[new.slot] = new.HasField("pooling") and self.embedding_size > 0
        if request.slots:
            self._slots = np.frombuffer(request.slots, dtype="<u2")
        slots = self._slots
        counts = np.frombuffer(request.num_scheduled_tokens, dtype="<u4") if request.num_scheduled_tokens else 1
        self._computed[slots] += counts
        samples = self._computed[slots] == self._num_tokens[slots]
        bad = np.isin(self._last[slots], list(self.bad_tokens)) if self.bad_tokens else np.zeros_like(samples)
        samples &= ~bad
        pooled = slots[samples & self._is_pooled[slots]]
        samples &= ~self._is_pooled[slots]
        sampling = slots[samples]
        step = int(self.weights.model.removeprefix("plus-"))
        self._last[sampling] = (self._last[sampling] + step) % self.vocab_size
        self._num_tokens[sampling] += 1
        output = worker_pb2.SamplerOutput(
            session_epoch=request.session_epoch,
            worker_incarnation=request.worker_incarnation,
            step=request.step,
            token_ids=self._last[sampling].tobytes(),
        )
        if request.num_lookahead_tokens or request.num_lookahead_slots:
            column = request.num_lookahead_tokens or bytes([request.num_lookahead_slots] * slots.size)
            self._guess(output, slots, samples, np.frombuffer(column, dtype=np.uint8).astype(np.int64), step)
        elif not samples.all():
            output.num_sampled_tokens = samples.astype(np.uint8).tobytes()
        if self.rank:
            output.ClearField("token_ids")
            output.num_sampled_tokens = bytes(len(slots))
        elif pooled.size:
            values = np.zeros((pooled.size, self.embedding_size), dtype="<f4")
            values[:, 0], values[:, 1] = self._num_tokens[pooled], self._last[pooled]
            output.pooled.slots, output.pooled.values = pooled.astype("<u2").tobytes(), values.tobytes()
        for slot in slots[bad]:
            output.bad_slots.add(slot=int(slot), code=13, message="logits are not finite")
        return output

    def _guess(
        self,
        output: worker_pb2.SamplerOutput,
        slots: npt.NDArray[Any],
        samples: npt.NDArray[Any],
        lookahead: npt.NDArray[Any],
        step: int,
    ) -> None:
        """Let `num_right` draft tokens of each sequence be right, and the others that the step allows wrong."""
        num_right = np.where(samples, np.minimum(lookahead, self.num_right), 0)
        token_ids = np.repeat(self._last[slots], 1 + num_right)[np.repeat(samples, 1 + num_right)]
        places = np.concatenate([np.arange(1 + count) for count in num_right[samples]] or [np.zeros(0)])
        output.token_ids = ((token_ids + step * places) % self.vocab_size).astype("<u4").tobytes()
        self._last[slots] = (self._last[slots] + step * num_right) % self.vocab_size
        self._num_tokens[slots] += num_right
        self._computed[slots] += num_right
        output.num_sampled_tokens = (samples * (1 + num_right)).astype(np.uint8).tobytes()
        output.num_draft_tokens = np.where(samples, lookahead, 0).astype(np.uint8).tobytes()
