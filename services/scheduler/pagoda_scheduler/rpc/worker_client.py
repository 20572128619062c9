"""WorkerClient: the client of one worker's service, for bring-up and the Execute stream."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator

import grpc
import grpc.aio

from pagoda.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.engine.convert import lora_adapter_to_proto, structured_outputs_to_proto
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.rpc.channels import connect
from pagoda_common.rpc.service import error_from_rpc
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.kv.cache_group import CacheSizes
from pagoda_scheduler.rpc.convert import StepEncoder, init_device_to_proto, model_runner_output_from_proto
from pagoda_scheduler.rpc.loading_bar import LoadingBar

logger = logging.getLogger(__name__)

EXECUTE = f"/{worker_pb2.DESCRIPTOR.services_by_name['Worker'].full_name}/Execute"
INIT_TIMEOUT_S = 60.0
CACHE_TIMEOUT_S = 300.0
"""Timeout of calls that profile, allocate the cache or record CUDA graphs."""


LORA_TIMEOUT_S = 600.0
"""Timeout of loading an adapter, which may be downloaded from a hub."""


class WorkerClient:
    """One worker: its channel, the calls of its bring-up, its Execute stream. GroupClient joins those of a group."""

    def __init__(
        self, *, address: str, incarnation: int, session_epoch: int, security: SecurityConfig | None = None
    ) -> None:
        """Raises ConfigError when `security` does not allow the address, or one of its files cannot be used."""
        self.address = address
        self._incarnation = incarnation
        self._epoch = session_epoch
        self._channel = connect(address, security=security)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        # Not the stub's serializer: counting bytes would need ByteSize(), which serializes once more.
        self._execute = self._channel.stream_stream(
            EXECUTE, request_serializer=self._to_bytes, response_deserializer=self._from_bytes
        )
        self._encoder = StepEncoder(session_epoch=session_epoch, worker_incarnation=incarnation)
        self._outgoing: asyncio.Queue[SchedulerOutput] = asyncio.Queue()
        self._stream: grpc.aio.StreamStreamCall[worker_pb2.ExecuteModelRequest, worker_pb2.SamplerOutput] | None = None
        self._sent: deque[tuple[int, int]] = deque()
        """For each step in flight: nanoseconds to encode it, and when it was sent."""
        self._writer: asyncio.Task[None] | None = None
        self._holds: dict[
            tuple[object, ...],
            grpc.aio.UnaryStreamCall[worker_pb2.HoldConstraintRequest, worker_pb2.HoldConstraintResponse],
        ] = {}
        """Open HoldConstraint calls, by constraint."""
        self.num_bytes_sent = 0
        """Counter: bytes of steps."""
        self.num_bytes_received = 0
        """Counter: bytes of results."""

    async def init_device(
        self, config: EngineConfig, weights: WeightsSource | None = None, *, rendezvous: str = ""
    ) -> str:
        """Claim the device.

        Args:
            weights: to load instead of the model's own.
            rendezvous: host:port where this rank meets the others; empty for rank 0.

        Returns:
            host:port where the other ranks meet rank 0; empty for other ranks, and for a single rank.

        Raises:
            PagodaError: the worker refused, failed or disconnected; the other calls raise the same.
        """
        request = init_device_to_proto(
            config, session_epoch=self._epoch, weights=weights, rendezvous_address=rendezvous
        )
        with _errors():
            device = await self._stub.InitDevice(request, timeout=INIT_TIMEOUT_S, wait_for_ready=True)
        if device.worker_incarnation != self._incarnation:
            raise NotReady(f"worker at {self.address} was restarted; waiting for its registration")
        logger.debug("worker %s: %s", self.address, device.device)
        return device.rendezvous_address

    async def load_model(self) -> types_pb2.ModelInfo:
        """Load the weights, unless they are already loaded."""
        info: types_pb2.ModelInfo | None = None
        bar = LoadingBar()
        with _errors():
            async for progress in self._stub.LoadModel(worker_pb2.LoadModelRequest(session_epoch=self._epoch)):
                line = bar.advance(progress.loaded_bytes, progress.total_bytes)
                if line is not None:
                    logger.info("loading weights %s", line)
                if progress.HasField("model_info"):
                    info = progress.model_info
        if info is None:
            raise NotReady(f"worker at {self.address} ended LoadModel without model_info")
        return info

    async def determine_num_available_blocks(self) -> CacheSizes:
        """The blocks that fit on the device and in host memory."""
        request = worker_pb2.DetermineNumAvailableBlocksRequest(session_epoch=self._epoch)
        with _errors():
            available = await self._stub.DetermineNumAvailableBlocks(request, timeout=CACHE_TIMEOUT_S)
        return CacheSizes(
            num_blocks=available.num_blocks,
            num_host_blocks=available.num_cpu_blocks,
            num_state_snapshots=available.num_state_snapshots,
            num_host_state_snapshots=available.num_cpu_state_snapshots,
        )

    async def initialize_cache(self, sizes: CacheSizes) -> int:
        """Allocate the cache; returns nanoseconds to move a block to the host or back."""
        request = worker_pb2.InitializeCacheRequest(
            session_epoch=self._epoch,
            num_blocks=sizes.num_blocks,
            num_cpu_blocks=sizes.num_host_blocks,
            num_state_snapshots=sizes.num_state_snapshots,
            num_cpu_state_snapshots=sizes.num_host_state_snapshots,
        )
        with _errors():
            return int((await self._stub.InitializeCache(request, timeout=CACHE_TIMEOUT_S)).swap_block_ns)

    async def hold_constraint(self, params: StructuredOutputsParams) -> None:
        """Make the worker compile a constraint, and keep it until `release_constraint`.

        Raises:
            InvalidRequest: the constraint cannot be compiled.
            PagodaError: the worker disconnected.
        """
        call = self._stub.HoldConstraint(
            worker_pb2.HoldConstraintRequest(
                session_epoch=self._epoch,
                worker_incarnation=self._incarnation,
                structured_output=structured_outputs_to_proto(params),
            )
        )
        try:
            with _errors():
                if await call.read() is grpc.aio.EOF:
                    raise NotReady(f"worker at {self.address} ended HoldConstraint without an answer")
        except PagodaError as error:
            call.cancel()
            if error.code is Code.INVALID_ARGUMENT:
                raise InvalidRequest(error.message, field="structured_outputs") from error
            raise
        except asyncio.CancelledError:
            call.cancel()
            raise
        self._holds[params.grammar_key] = call

    def release_constraint(self, params: StructuredOutputsParams) -> None:
        """Release a constraint; no-op if the worker does not hold it."""
        if (call := self._holds.pop(params.grammar_key, None)) is not None:
            call.cancel()

    async def add_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Load an adapter in the worker, concurrently with steps."""
        request = worker_pb2.WorkerAddLoraRequest(
            session_epoch=self._epoch,
            worker_incarnation=self._incarnation,
            number=number,
            adapter=lora_adapter_to_proto(adapter),
        )
        with _errors():
            await self._stub.AddLora(request, timeout=LORA_TIMEOUT_S)

    def open_stream(self) -> None:
        """Open the Execute stream; `send` and `receive` need it."""
        self._stream = self._execute()
        self._writer = asyncio.create_task(self._write())

    def send(self, output: SchedulerOutput) -> None:
        """Send a step; returns at once."""
        self._outgoing.put_nowait(output)

    async def receive(self) -> ModelRunnerOutput:
        """The next result.

        Raises:
            PagodaError: the stream ended.
        """
        assert self._stream is not None, "open_stream() comes first"
        try:
            message = await self._stream.read()
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        if not isinstance(message, worker_pb2.SamplerOutput):  # grpc.aio.EOF
            details = await self._stream.details()
            raise NotReady(f"worker at {self.address} ended the Execute stream: {details or 'without a reason'}")
        encode_ns, sent_ns = self._sent.popleft()
        round_trip_ns = time.perf_counter_ns() - sent_ns
        return model_runner_output_from_proto(message, encode_ns=encode_ns, round_trip_ns=round_trip_ns)

    async def _write(self) -> None:
        assert self._stream is not None
        try:
            while True:
                output = await self._outgoing.get()
                started_ns = time.perf_counter_ns()
                message = self._encoder.encode(output)
                sent_ns = time.perf_counter_ns()
                self._sent.append((sent_ns - started_ns, sent_ns))
                await self._stream.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # receive() reports why the stream ended

    def _to_bytes(self, message: worker_pb2.ExecuteModelRequest) -> bytes:
        data = message.SerializeToString()
        self.num_bytes_sent += len(data)
        return data

    def _from_bytes(self, data: bytes) -> worker_pb2.SamplerOutput:
        self.num_bytes_received += len(data)
        return worker_pb2.SamplerOutput.FromString(data)

    async def close(self) -> None:
        """Cancel the stream and close the channel."""
        if self._writer is not None:
            self._writer.cancel()
        if self._stream is not None:
            self._stream.cancel()
        for call in self._holds.values():
            call.cancel()
        await self._channel.close()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn gRPC errors into PagodaErrors."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error
