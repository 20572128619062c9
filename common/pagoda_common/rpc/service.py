"""gRPC servers of all services: health, reflection, one error mapping and one access check."""

import asyncio
import contextlib
import inspect
import logging
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagoda_common.config.security_config import ServerSecurity
from pagoda_common.errors import CannotListen, Code, ConfigError, InvalidRequest, PagodaError
from pagoda_common.rpc.arrival import Arrivals
from pagoda_common.rpc.bounded_health import BoundedHealth
from pagoda_common.rpc.channels import MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES, WINDOW_OPTIONS
from pagoda_common.rpc.channels import connect as connect
from pagoda_common.rpc.credentials import server_credentials, token_guard
from pagoda_common.rpc.flood_guard import FloodGuard

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 32 * 1024
"""Metadata of one call; beyond it RESOURCE_EXHAUSTED."""
MAX_CONCURRENT_STREAMS = 4096
"""Calls at a time over one connection; a client's further ones wait on its side."""
READ_BYTES = 128 * 1024
"""Read of a connection at once. What is read of an endless header block is parsed even when its connection is ended."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""A connected peer that sends nothing for this time is disconnected."""
MAX_ERROR_BYTES = 1_300
"""Text of one error. It travels three times, in metadata of which a client of gRPC takes 8 KiB by default: once with
three bytes for one that is not ASCII, and twice in base64."""
SMALL_CALLS = frozenset(f"/{health.SERVICE_NAME}/{name}" for name in ("Check", "Watch", "List"))
"""Calls that need no token. Their messages are some bytes, so one that does not come in one go is not awaited."""
LIVENESS = "liveness"
"""Name under which grpc.health.v1 answers SERVING as long as the process answers at all, for liveness probes. The empty
name and the service's own follow what the service can do."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    # Clients such as Envoy and smg ping every 30 s also when idle; never answer that with GOAWAY.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    *WINDOW_OPTIONS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.experimental.tcp_max_read_chunk_size", READ_BYTES),
    # Two servers on one port would share its connections by chance.
    ("grpc.so_reuseport", 0),
]

GRPC_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def error_status(error: PagodaError) -> status_pb2.Status:
    """`error` as google.rpc.Status with BadRequest and RetryInfo details where they apply. A long message loses its
    middle."""
    message, details = _within_metadata(error.message), []
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s > 0:
        delay = duration_pb2.Duration(nanos=int(error.retry_after_s % 1 * 1e9), seconds=int(error.retry_after_s))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=error.code, message=message, details=packed)


def _within_metadata(message: str) -> str:
    data = message.encode(errors="replace")
    if len(data) <= MAX_ERROR_BYTES:
        return message
    half = MAX_ERROR_BYTES // 2
    return f"{data[:half].decode(errors='ignore')} … {data[-half:].decode(errors='ignore')}"


def error_from_rpc(error: grpc.RpcError) -> PagodaError:
    """The PagodaError that a peer answered with; connection errors come out as UNAVAILABLE."""
    is_answer = isinstance(error, (grpc.Call, grpc.aio.AioRpcError))  # of a blocking stub, of an asyncio one
    code = error.code() if is_answer else grpc.StatusCode.UNKNOWN
    message = (error.details() if is_answer else None) or str(error)
    number = code.value[0]
    known = Code(number) if number in Code._value2member_map_ else Code.INTERNAL
    return PagodaError(message, code=known)


async def _fail(context: Any, error: Exception, method: str) -> None:
    if isinstance(error, PagodaError):
        status = error_status(error)
    elif isinstance(error, NotImplementedError) and context.code() is grpc.StatusCode.UNIMPLEMENTED:
        # The method of a generated servicer, which ours has not overridden.
        status = status_pb2.Status(code=Code.UNIMPLEMENTED, message=f"{method} is not implemented here")
    else:
        logger.exception("%s failed", method, exc_info=error)
        status = status_pb2.Status(code=Code.INTERNAL, message=f"internal error: {type(error).__name__}")
    details = (("grpc-status-details-bin", status.SerializeToString()),) if status.details else ()
    await context.abort(GRPC_CODES[status.code], status.message, details)


Decode: TypeAlias = Callable[[bytes], Any] | None
Read: TypeAlias = Callable[[Any, Any], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps PagodaErrors to their status and details, and everything else to INTERNAL with a logged traceback.

    Handlers that are async generators are closed as soon as their call is over. A call of one message is taken over
    before the message is there, so that its time is bounded (arrival.py).
    """

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._closing: set[asyncio.Task[None]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        asked, answered = ("stream" if s else "unary" for s in (handler.request_streaming, handler.response_streaming))
        decode, gets_stream = handler.request_deserializer, handler.request_streaming
        behaviour = getattr(handler, f"{asked}_{answered}")
        wrap = self._wrap_stream if inspect.isasyncgenfunction(behaviour) else self._wrap_call
        make = getattr(grpc, f"stream_{answered}_rpc_method_handler")
        return make(
            # A single request is decoded inside, where a malformed one is INVALID_ARGUMENT and not INTERNAL.
            wrap(behaviour, method, self._all if gets_stream else self._one(decode, is_small=method in SMALL_CALLS)),
            request_deserializer=decode if gets_stream else None,
            response_serializer=handler.response_serializer,
        )

    def _one(self, decode: Decode, *, is_small: bool) -> Read:
        """Reads the one message of a call."""

        async def read(requests: Any, context: Any) -> Any:
            return _decoded(await self.arrivals.message(requests, context, can_be_late=not is_small), decode)

        return read

    async def _all(self, requests: Any, context: Any) -> Any:
        """The messages of a call."""
        self.arrivals.stream_begins(context)
        return requests

    def _wrap_call(self, behaviour: Callable[..., Any], method: str, read: Read) -> Callable[..., Any]:
        async def call(requests: Any, context: Any) -> Any:
            try:
                request = await read(requests, context)
                return await behaviour(request, context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _fail(context, error, method)

        return call

    def _wrap_stream(self, behaviour: Callable[..., Any], method: str, read: Read) -> Callable[..., Any]:
        async def stream(requests: Any, context: Any) -> AsyncGenerator[Any]:
            try:
                request = await read(requests, context)
                responses = behaviour(request, context)
                context.add_done_callback(lambda _: self._close(responses))
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        yield response
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _fail(context, error, method)

        return stream

    def _close(self, responses: AsyncGenerator[Any, None]) -> None:
        """A call is over. One that was cancelled while a message was being written leaves its generator suspended:
        without this, it would run until it is collected."""
        task = asyncio.create_task(_end(responses))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _end(responses: AsyncGenerator[Any, None]) -> None:
    with contextlib.suppress(RuntimeError):  # it runs, so the cancellation has reached it
        await responses.aclose()


def _decoded(request: Any, decode: Decode) -> Any:
    if decode is None:
        return request
    try:
        return decode(request)
    except DecodeError as error:
        raise InvalidRequest("the request is not a valid protobuf message of its type") from error


class RpcServer:
    """A gRPC server with health, reflection and error mapping.

    Add servicers to `grpc_server`, then `start()`. Health says NOT_SERVING until `set_serving(True)`.
    """

    def __init__(
        self,
        *,
        services: tuple[str, ...],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        security: ServerSecurity | None = None,
        enable_channelz: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """
        Args:
            max_message_bytes: of a request; a longer one is refused when its length is known.
            services: full names, such as pagoda.v1.Worker, for health and reflection.
            interceptors: they come after the error mapping, so that they may raise, and after the token's check.
            security: None is plaintext, on loopback.
            enable_channelz: serve grpc.channelz.v1 as well.

        Raises:
            ConfigError: a file of `security` cannot be used, or grpcio-channelz is not installed.
        """
        self._security = security or ServerSecurity()
        self._credentials = server_credentials(self._security)
        guard = token_guard(self._security)
        errors = ErrorInterceptor()
        self.arrivals = errors.arrivals
        self.flood_guard: FloodGuard | None = None
        """Set by `start` on Linux without TLS."""
        chain = [errors, *([] if guard is None else [guard]), *interceptors]
        options = {**dict(SERVER_OPTIONS), "grpc.max_receive_message_length": max_message_bytes}
        if enable_channelz:
            options["grpc.enable_channelz"] = 1
        self.grpc_server = grpc.aio.server(interceptors=chain, options=list(options.items()))
        self._names = ("", *services)
        self._health = BoundedHealth()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        if enable_channelz:
            names = (*names, _add_channelz(self.grpc_server))
        reflection.enable_server_reflection(names, self.grpc_server)

    async def start(self, *, host: str, port: int, local_address: str | None = None) -> int:
        """Listen and return the bound port (`port` 0 takes a free one).

        Args:
            local_address: of an abstract socket (local_socket.py), to listen there as well.

        Raises:
            CannotListen: the address cannot be bound.
            ConfigError: others would reach it in plaintext, or there is an abstract socket beside TLS.
        """
        self._security.check_listen(host)
        if local_address is not None and self._credentials is not None:
            message = f"local_address is {local_address!r}, must not be given with TLS, which it is without"
            raise ConfigError(message, field="local_address")
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        bound = self._listen(f"{host}:{port}")
        if local_address is not None:
            self._listen(local_address)
        await self.grpc_server.start()
        if sys.platform == "linux" and self._credentials is None:
            self.flood_guard = FloodGuard(bound, self.arrivals.peers)
            self.flood_guard.start()
        return bound

    def _listen(self, address: str) -> int:
        try:
            if self._credentials is None:
                bound = self.grpc_server.add_insecure_port(address)
            else:
                bound = self.grpc_server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}") from error
        if bound == 0:
            raise CannotListen(f"cannot listen on {address}")
        return int(bound)

    async def set_serving(self, is_serving: bool) -> None:
        """Set what grpc.health.v1 answers, for the server as a whole and each service."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc_server.stop(grace_s)
        if self.flood_guard is not None:
            self.flood_guard.stop()


def _add_channelz(server: grpc.aio.Server) -> str:
    """Serve grpc.channelz.v1; its name."""
    try:
        from grpc_channelz.v1 import channelz  # an optional package
    except ImportError as error:
        message = "enable_channelz needs the package grpcio-channelz: pip install 'pagoda-llm[channelz]'"
        raise ConfigError(message, field="enable_channelz") from error
    channelz.add_channelz_servicer(server)
    return "grpc.channelz.v1.Channelz"


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM or SIGINT sets. A second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def on_signal() -> None:
        event.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield event
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
