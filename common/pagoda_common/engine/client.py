"""EngineClient: submits token ids and receives token ids, across losses of the scheduler.

    client = EngineClient(address="127.0.0.1:50051")
    await client.start()
    await client.wait_until_ready(60)
    stream = client.submit(EngineRequest(request_id="a", prompt_token_ids=[1, 2], sampling_params=SamplingParams()))
    while not stream.is_finished:
        outputs = await stream.get()

A broken connection is made again with back-off, and every open request is submitted again with what it has. Knows
nothing of text.
"""

import asyncio
import copy
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import grpc
import grpc.aio

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.engine.control import EngineControl
from pagoda_common.engine.convert import (
    adopted_request_from_proto,
    lora_adapter_from_proto,
    model_summary_from_proto,
)
from pagoda_common.engine.interface import ModelSummary
from pagoda_common.engine.session import EngineSession
from pagoda_common.engine.stream import AdoptedRequest, EngineRequest, EngineStream
from pagoda_common.errors import InvalidRequest, NotFound, NotReady, PagodaError, QueueFull, Superseded
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.rpc.channels import Connection
from pagoda_common.rpc.service import error_from_rpc

__all__ = ["EngineClient", "EngineRequest", "EngineStream"]

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 0.3
"""Clients wait for the scheduler: what is too long here is a pause of theirs."""
STABLE_S = 1.0
"""A session that lived this long resets the back-off."""
METRICS_TIMEOUT_S = 2.0
ADOPT_TIMEOUT_S = 10.0
MAX_OUTGOING = 65_536
"""Messages that may wait to be written before new requests are refused."""


class EngineClient:
    """One frontend's connection to one scheduler. Belongs to the event loop that started it."""

    def __init__(self, *, address: str, frontend_id: str | None = None, security: SecurityConfig | None = None) -> None:
        """
        Args:
            address: host:port; or several with commas between, tried in turn: when the scheduler is lost and comes back
                elsewhere, open requests continue there.
            frontend_id: random if not given.

        Raises:
            ConfigError: `security` does not allow an address, or has a file that cannot be used.
        """
        self.frontend_id = frontend_id or secrets.token_hex(8)
        connections = [Connection(one.strip(), security=security) for one in address.split(",")]
        self._connection = connections[0]
        """In use."""
        self._connections = deque(connections)
        self._task: asyncio.Task[None] | None = None
        self._session: EngineSession | None = None
        self._streams: dict[str, EngineStream] = {}
        self.num_losses = 0
        """Counter: sessions that broke."""
        self._lost_at: float | None = None
        """By time.monotonic(): when a session broke whose scheduler served, until one serves again."""
        self._was_connected = False
        self._is_closed = False
        self._ready = asyncio.Event()
        self._reason = f"connecting to the scheduler at {self.address}"
        self._load = types_pb2.EngineLoad()
        self._model_info: types_pb2.ModelInfo | None = None
        self._lora_list: scheduler_pb2.LoraList | None = None
        """The last list from the scheduler; None: it takes no adapters."""
        self._loras: dict[str, LoraAdapter] = {}

    @property
    def address(self) -> str:
        """Address of the scheduler that is used or tried."""
        return self._connection.address

    async def start(self) -> None:
        """Begin to connect in the background."""
        if self._task is None:
            self._is_closed = False
            self._ready.clear()
            self._connection.renew()
            self._task = asyncio.create_task(self._run())

    async def close(self, reason: str = "the engine client was closed") -> None:
        """End the connection; open requests fail with NotReady and `reason`."""
        self._is_closed = True  # a cancellation can get lost where a stream breaks at the same moment
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for stream in list(self._streams.values()):
            stream.fail(NotReady(reason))
        self._streams.clear()
        self._reason = reason
        self._ready.set()  # wakes the waiting callers, which then raise the reason
        for connection in self._connections:
            await connection.close()

    async def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Wait until requests can be served.

        Raises:
            NotReady: not within `timeout_s`, or closed; the message says why.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise NotReady(f"not ready after {timeout_s:g} s: {self.not_ready_reason}", retry_after_s=1) from None
        if self._is_closed:
            raise NotReady(self.not_ready_reason, retry_after_s=1)

    @property
    def is_connected(self) -> bool:
        """A session is open."""
        return self._session is not None

    @property
    def is_ready(self) -> bool:
        """Connected, and the engine serves."""
        return self._session is not None and self._load.is_ready

    @property
    def lost_for_s(self) -> float | None:
        """Seconds since a scheduler was lost that served; None while one serves, and before one has."""
        return None if self._lost_at is None else time.monotonic() - self._lost_at

    @property
    def is_sleeping(self) -> bool:
        """Connected, and the engine does not serve because it sleeps: requests wait until it is woken."""
        return self._session is not None and self._load.sleep_level > 0

    @property
    def control(self) -> EngineControl:
        """Sleep, wake-up and new weights.

        Raises:
            NotReady: not started, or closed.
        """
        channel = self._connection.channel
        if channel is None:
            raise NotReady(self.not_ready_reason, retry_after_s=1)
        return EngineControl(channel)

    @property
    def not_ready_reason(self) -> str:
        """Why is_ready is false; empty when it is true."""
        if self.is_ready:
            return ""
        if self._session is None:
            return self._reason
        return self._load.not_ready_reason or "the engine is starting"

    @property
    def model_info(self) -> types_pb2.ModelInfo | None:
        """The model, once it was known."""
        return self._model_info

    @property
    def model_summary(self) -> ModelSummary | None:
        """The same, as cores know it."""
        return None if self._model_info is None else model_summary_from_proto(self._model_info)

    @property
    def loras(self) -> Mapping[str, LoraAdapter]:
        """The adapters that requests may have, by name."""
        return self._loras

    @property
    def resolves_loras(self) -> bool:
        """Whether the scheduler may find an adapter of a name that is not listed."""
        return self._lora_list is not None and self._lora_list.has_resolver

    async def add_lora(self, adapter: LoraAdapter, *, load_inplace: bool = False) -> LoraAdapter:
        """Serve an adapter, as `EngineControl.add_lora`; requests may name it at once."""
        added = await self.control.add_lora(adapter, load_inplace=load_inplace)
        self._loras[added.name] = added
        return added

    async def remove_lora(self, name: str) -> None:
        """As `EngineControl.remove_lora`; requests may not name it any more."""
        await self.control.remove_lora(name)
        self._loras.pop(name, None)

    async def resolve_lora(self, name: str) -> LoraAdapter | None:
        """The adapter of a name that is not listed, where the scheduler finds one; None: it does not.

        Raises:
            PagodaError: the scheduler does not answer, or the adapter cannot be used.
        """
        if not self.resolves_loras:
            return None
        try:
            return await self.add_lora(LoraAdapter(name=name))
        except NotFound:
            return None

    @property
    def load(self) -> types_pb2.EngineLoad:
        """The latest load."""
        return self._load

    @property
    def num_open_requests(self) -> int:
        """Requests from which the engine still owes something."""
        return len(self._streams)

    async def metrics_text(self) -> bytes:
        """The scheduler's own metrics in Prometheus' text format; nothing while it does not answer."""
        channel = self._connection.channel
        if channel is None or self._session is None:
            return b""
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        try:
            answer = await stub.GetMetrics(scheduler_pb2.GetMetricsRequest(), timeout=METRICS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return b""
        return bytes(answer.text)

    def submit(self, request: EngineRequest) -> EngineStream:
        """Start a request. Its seed is drawn here when it has none, once and for all attempts.

        Raises:
            NotReady: there never was a connection, or it was closed.
            InvalidRequest: the request_id is in use.
            QueueFull: the connection cannot keep up.
        """
        if self._is_closed or not self._was_connected:
            raise NotReady(self.not_ready_reason, retry_after_s=1)
        if request.adopted is not None and (old := self._streams.pop(request.request_id, None)) is not None:
            # Its client's connection was lost silently: its reader gets an error, the engine continues.
            old.fail(Superseded(f"request {request.request_id} continues elsewhere"))
        if request.request_id in self._streams:
            raise InvalidRequest(f"request_id {request.request_id!r} is in use", field="request_id")
        if self._session is not None and self._session.num_outgoing >= MAX_OUTGOING:
            raise QueueFull(f"{MAX_OUTGOING} messages wait for the scheduler", retry_after_s=1)
        if request.sampling_params.seed is None:
            params = copy.copy(request.sampling_params)
            params.seed = secrets.randbits(63)
            request = replace(request, sampling_params=params)
        stream = EngineStream(request=request, on_stop=self._stop, on_abort=self._abort)
        if stream.is_done:  # adopted when it had ended
            return stream
        self._streams[request.request_id] = stream
        if self._session is not None:
            self._session.submit(stream)
        return stream

    async def adopt(self, resume_key: str) -> list[AdoptedRequest]:
        """What the engine knows of the requests that any frontend submitted with this key.

        Raises:
            NotFound: nothing, or not any more.
            NotReady: the scheduler does not answer.
        """
        channel = self._connection.channel
        if channel is None:
            raise NotReady(self.not_ready_reason, retry_after_s=1)
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        try:
            answer = await stub.Adopt(scheduler_pb2.AdoptRequest(resume_key=resume_key), timeout=ADOPT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFound(str(error.details()), field="resume_key") from error
            raise error_from_rpc(error) from error
        return [adopted_request_from_proto(request) for request in answer.requests]

    def release(self, request_id: str) -> None:
        """The client has everything: the engine need not keep the request for an adopter."""
        if self._session is not None:
            self._session.release(request_id)

    def abort(self, request_id: str) -> None:
        """End a request now. Unknown ids are ignored."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.abort()

    def _stop(self, stream: EngineStream, index: int) -> None:
        request_id = stream.request.request_id
        if self._session is not None:
            self._session.stop(request_id, index)
        if stream.is_done:
            self._forget(request_id)

    def _abort(self, stream: EngineStream) -> None:
        request_id = stream.request.request_id
        if self._session is not None:
            self._session.abort(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if self._session is not None:
            self._session.forget(request_id)

    async def _run(self) -> None:
        """Session after session."""
        backoff_s = MIN_BACKOFF_S
        while not self._is_closed:
            started = time.monotonic()
            session = EngineSession(
                stub=scheduler_pb2_grpc.SchedulerStub(self._connection.renew()),
                frontend_id=self.frontend_id,
                streams=self._streams,
                on_open=self._open,
                on_state=self._take_state,
                loras=self._lora_list,
            )
            try:
                await session.run()
            except (grpc.aio.AioRpcError, PagodaError) as error:
                self._lose(error_from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error)
            except Exception as error:
                logger.exception("a session failed")
                self._lose(PagodaError(str(error)))
            finally:
                self._session = None
                self._ready.clear()
            if self._is_closed:
                return
            self._connections.rotate(-1)
            self._connection = self._connections[0]
            if time.monotonic() - started > STABLE_S:
                backoff_s = MIN_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _open(self, session: EngineSession) -> None:
        self._session = session
        self._was_connected = True
        if self._streams:
            logger.info("connected to the scheduler at %s; %d requests continue", self.address, len(self._streams))
        for stream in self._streams.values():
            session.submit(stream)

    def _lose(self, error: PagodaError) -> None:
        if self._session is not None:
            self.num_losses += 1
            if self._load.is_ready:
                self._lost_at = time.monotonic()
            waiting = len(self._streams)
            logger.warning("lost the scheduler at %s with %d open requests: %s", self.address, waiting, error.message)
        self._reason = f"no connection to the scheduler at {self.address}: {error.message}"
        for request_id, stream in list(self._streams.items()):
            if stream.is_overdue:
                del self._streams[request_id]
                stream.expire()

    def _take_state(self, message: scheduler_pb2.SchedulerMessage) -> None:
        if message.HasField("model_info"):
            self._model_info = message.model_info
        if message.HasField("loras"):
            self._lora_list = message.loras
            adapters = map(lora_adapter_from_proto, message.loras.adapters)
            self._loras = {adapter.name: adapter for adapter in adapters}
        if message.HasField("load"):
            self._load = message.load
            if self._load.is_ready or self._load.sleep_level > 0:
                self._lost_at = None
            if self._load.is_ready:
                self._ready.set()
            else:
                self._ready.clear()
