"""One frontend from start to end: serves HTTP and gRPC on one loop, and shuts down without losing streams."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace

import grpc.aio
import uvicorn
from fastapi import FastAPI

from pagoda.v1 import inference_pb2_grpc
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.engine.client import EngineClient
from pagoda_common.errors import CannotListen, ConfigError, PagodaError
from pagoda_common.metrics.engine_metrics import EngineCollector
from pagoda_common.process.idle_memory import exempt_what_exists, release_memory_when_idle
from pagoda_common.process.logging import log_life
from pagoda_common.process.startup_marks import mark
from pagoda_common.rpc.bearer import read_keys
from pagoda_common.rpc.service import RpcServer
from pagoda_frontend.budget.held_memory import HeldMemory
from pagoda_frontend.grpc.access import require_api_key_rpc
from pagoda_frontend.grpc.bounds import MAX_MESSAGE_BYTES
from pagoda_frontend.grpc.servicer import SERVICE, InferenceServicer
from pagoda_frontend.grpc.shared_servicer import SharedServicer
from pagoda_frontend.grpc.traces import TraceRpc
from pagoda_frontend.http.app import make_app
from pagoda_frontend.http.connection.http_protocol import bounded
from pagoda_frontend.http.connection.https import follow_certificate
from pagoda_frontend.observability.history import Moment
from pagoda_frontend.observability.metrics import Metrics
from pagoda_frontend.observability.statistics import Totals, log_statistics
from pagoda_frontend.serving.models import Models, name_of
from pagoda_frontend.serving.serving import Serving
from pagoda_frontend.serving.shared import Shared

logger = logging.getLogger(__name__)

BACKLOG = 2048
CLOSE_S = 2.0
"""Time for connections to send their last bytes."""
POLL_S = 0.02
EVENT_BYTES = 16 * 1024
"""Bytes of request bodies that count as one event for returning memory after a burst."""


class _HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers: the frontend handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Part:
    """One model with the connection to its scheduler."""

    def __init__(self, config: FrontendConfig, shared: Shared) -> None:
        self.engine = EngineClient(address=config.scheduler, security=config.security)
        self.metrics = Metrics(engine=self.engine, engine_collector=self._engine_collector)
        self.serving = Serving(config=config, engine=self.engine, metrics=self.metrics, shared=shared)

    def _engine_collector(self, model_name: str) -> EngineCollector:
        return EngineCollector(load=lambda: self.engine.load, model_name=model_name)

    def totals(self) -> Totals:
        """The current figures."""
        load, (num_prompt_tokens, num_generation_tokens) = self.engine.load, self.metrics.token_totals()
        return Totals(
            num_prompt_tokens=num_prompt_tokens,
            num_generation_tokens=num_generation_tokens,
            num_running_reqs=load.num_running_reqs,
            num_waiting_reqs=load.num_waiting_reqs,
            kv_cache_usage=load.num_used_blocks / load.num_total_blocks if load.num_total_blocks else 0.0,
            prefix_cache_queries=load.prefix_cache_queries,
            prefix_cache_hits=load.prefix_cache_hits,
        )

    def moment(self) -> Moment:
        """The current figures with latencies."""
        first_token, next_token = self.metrics.latencies()
        return Moment(totals=self.totals(), first_token=first_token, next_token=next_token)


class FrontendServer:
    """Serves until `drain()` or `close()`, even while engines are lost and come back."""

    def __init__(self, *, config: FrontendConfig) -> None:
        """Raises ConfigError when a file in `config` cannot be read, or gRPC would be plaintext over a network."""
        if config.api_key_file is not None:
            keys = read_keys(config.api_key_file, field="api_key_file")
            config = replace(config, api_key=(*config.api_key, *keys))
        if config.operator_key_file is not None:
            keys = read_keys(config.operator_key_file, field="operator_key_file")
            config = replace(config, operator_key=(*config.operator_key, *keys))
        self._config = config
        shared = Shared.of(config)
        self._parts = tuple(_Part(one, shared) for one in config.of_models)
        self.models = Models([part.serving for part in self._parts])
        guards: list[grpc.aio.ServerInterceptor] = []
        if config.api_key:
            guards.append(require_api_key_rpc(shared.api_keys))
        if shared.tracer is not None:
            guards.append(TraceRpc(service=SERVICE, tracer=shared.tracer))
        self._grpc_host = config.host if config.grpc_host is None else config.grpc_host
        config.public_grpc.check_listen(self._grpc_host)
        self._rpc = RpcServer(
            services=(SERVICE,),
            interceptors=guards,
            security=config.public_grpc,
            enable_channelz=config.observability.enable_channelz,
            max_message_bytes=min(config.max_request_body_bytes, MAX_MESSAGE_BYTES),
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._http: _HttpServer | None = None
        self.port = 0
        """Bound HTTP port."""
        self.grpc_port = 0
        """Bound gRPC port."""

    @property
    def serving(self) -> Serving:
        """The first model."""
        return self._parts[0].serving

    @property
    def engine(self) -> EngineClient:
        """The connection to its scheduler."""
        return self._parts[0].engine

    @property
    def engines(self) -> list[EngineClient]:
        """The connections to the schedulers of all models."""
        return [part.engine for part in self._parts]

    async def start(self) -> None:
        """Listen. Returns when both ports answer; the engine may still be loading.

        Raises:
            CannotListen: an address cannot be bound.
        """
        config = self._config
        listener = _listen(config.host, config.port)
        self.port = listener.getsockname()[1]
        try:
            inference_pb2_grpc.add_InferenceServicer_to_server(self._servicer(), self._rpc.grpc_server)
            self.grpc_port = await self._rpc.start(host=_bracketed(self._grpc_host), port=config.grpc_port)
        except BaseException:
            listener.close()
            raise
        for engine in self.engines:
            await engine.start()
        await self.models.start()
        shared = self.serving.shared
        uvicorn_config = _uvicorn_config(make_app(self.models, self.engines), config, held_memory=shared.held_memory)
        self._http = _HttpServer(uvicorn_config)
        if config.uvicorn_log_level == "info":
            logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it tells of starts and ends, as we do
        self._tasks = [
            asyncio.create_task(self._http.serve(sockets=[listener]), name="http"),
            asyncio.create_task(self._follow_readiness(), name="readiness"),
            asyncio.create_task(
                release_memory_when_idle(
                    count=self._num_events,
                    is_idle=lambda: self.models.num_open == 0,
                    trims_while_open=True,
                ),
                name="idle memory",
            ),
        ]
        if not config.disable_status_page:
            for part in self._parts:
                keeping = part.serving.history.keep(part.moment)
                self._tasks.append(asyncio.create_task(keeping, name="history"))
        if not config.observability.disable_log_stats:
            for part in self._parts:
                name = name_of(part.serving) if self.models.are_several else ""
                logging_it = log_statistics(part.totals, model=name)
                self._tasks.append(asyncio.create_task(logging_it, name="statistics"))
        if config.ssl_certfile is not None:
            assert uvicorn_config.ssl is not None, "loaded"
            follow = follow_certificate(uvicorn_config.ssl, config)
            self._tasks.append(asyncio.create_task(follow, name="certificate"))
        while not self._http.started:
            if self._tasks[0].done():
                await self._tasks[0]
                raise PagodaError("the HTTP server did not start")
            await asyncio.sleep(POLL_S)
        exempt_what_exists()
        scheme = "http" if config.ssl_certfile is None else "https"
        log_life(logger, "frontend listening on %s://%s:%d", scheme, _bracketed(config.host), self.port)
        mark("tokenizer, listening")
        log_life(logger, "frontend gRPC listening on %s:%d", _bracketed(self._grpc_host), self.grpc_port)

    def _servicer(self) -> inference_pb2_grpc.InferenceServicer:
        each = [InferenceServicer(serving=part.serving, engine=part.engine) for part in self._parts]
        return SharedServicer(models=self.models, servicers=each) if self.models.are_several else each[0]

    async def wait_failed(self) -> None:
        """Return when the HTTP server has ended by itself."""
        await asyncio.wait(self._tasks[:1])

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let open ones finish for `timeout_s`, then close. Health stays live meanwhile."""
        self.models.is_draining = True
        await self._rpc.set_serving(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.models.wait_until_idle()
        if not self.models.is_idle:
            num_unfinished = max(self.models.num_open, self.models.num_calls)
            logger.warning("%d requests were not finished after %g s", num_unfinished, timeout_s)
        await self.close()

    async def close(self) -> None:
        """End open requests with an error, then everything else."""
        self.models.is_draining = True
        await self.models.close()
        reason = self.models.not_ready_reason
        await asyncio.gather(*(engine.close(reason) for engine in self.engines))
        await self._rpc.stop(grace_s=CLOSE_S)
        if self._http is not None:
            self._http.should_exit = True
            await asyncio.gather(self._tasks[0], return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _num_events(self) -> int:
        """Number of events that may have left free memory."""
        num_held = self.serving.held_memory.num_bytes_taken // EVENT_BYTES
        return self.models.num_requests + num_held + self._rpc.arrivals.num_late_seen

    async def _follow_readiness(self) -> None:
        """Keep grpc.health.v1 equal to /ready."""
        was_ready = False
        while True:
            is_ready = self.models.is_ready
            if is_ready != was_ready:
                was_ready = is_ready
                await self._rpc.set_serving(is_ready)
                if is_ready:
                    log_life(logger, "ready")
                elif not self.models.is_draining:
                    logger.info("not ready: %s", self.models.not_ready_reason)
            await asyncio.sleep(POLL_S * 5)


def _uvicorn_config(app: FastAPI, config: FrontendConfig, *, held_memory: HeldMemory) -> uvicorn.Config:
    """Raises ConfigError when a file of the TLS flags cannot be used."""
    uvicorn_config = uvicorn.Config(
        app,
        http=bounded(
            max_head_bytes=config.h11_max_incomplete_event_size,
            max_headers=config.h11_max_header_count,
            send_timeout_s=config.send_timeout_s,
            held_memory=held_memory,
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        backlog=BACKLOG,
        timeout_keep_alive=config.keep_alive_timeout_s,
        timeout_graceful_shutdown=int(CLOSE_S),
        server_header=False,
        proxy_headers=bool(config.forwarded_allow_ips),
        forwarded_allow_ips=["*"] if "*" in config.forwarded_allow_ips else list(config.forwarded_allow_ips),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
    if config.ssl_certfile is not None:
        try:
            uvicorn_config.load()
        except OSError as error:
            raise ConfigError(
                f"ssl_certfile {config.ssl_certfile!r} cannot be used: {error}", field="ssl_certfile"
            ) from error
    return uvicorn_config


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol number is set; connections inherit the option here.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
