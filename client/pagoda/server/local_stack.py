"""The services of one machine: their command lines, ports and addresses."""

import asyncio
import contextlib
import http.client
import json
import logging
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from pagoda.server.early_checks import check_early
from pagoda.server.load_fault import not_ready_reason
from pagoda.server.service_token import token_environment, with_token
from pagoda.server.worker_services import with_standby, worker_services
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.flags.flags import engine_config_to_argv, frontend_config_to_argv
from pagoda_common.config.frontend_config import (
    API_KEY_VARIABLE,
    OPERATOR_KEY_VARIABLE,
    PLAINTEXT_ADVICE,
    FrontendConfig,
)
from pagoda_common.config.pooler_config import pooler_config
from pagoda_common.errors import ConfigError
from pagoda_common.process.children import can_listen, free_port, service_command
from pagoda_common.process.supervisor import Service

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
READY_POLL_S = 0.1
DRAIN_MARGIN_S = 5.0
"""Seconds that a service gets on top of the drain timeout before it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStack:
    """Scheduler, workers and frontend of one machine. Ports stay the same over restarts."""

    engine: EngineConfig
    frontend: FrontendConfig
    """With real ports and the scheduler's address."""
    metrics_port: int | None = None
    """Where the scheduler serves its own Prometheus metrics; None is nowhere."""
    worker_metrics_port: int | None = None
    """Where the first worker does; the others count on from there."""

    @classmethod
    def plan(
        cls,
        *,
        engine: EngineConfig,
        frontend: FrontendConfig,
        scheduler_port: int,
        metrics_port: int | None = None,
        worker_metrics_port: int | None = None,
    ) -> Self:
        """Settle the ports, 0 becomes a free one, and the token that the services show each other.

        Raises:
            ConfigError: a port is taken, out of range or given twice; or the model is no directory and no hub id.
        """
        check_early(engine, tokenizer=frontend.tokenizer, chat_template=frontend.chat_template)
        engine = replace(engine, security=with_token(engine.security))
        if pooler_config(engine.model.pooler_config).splits_long:
            frontend = replace(frontend, enable_long_inputs=True)
        own = replace(frontend.security, service_token=engine.security.service_token)
        frontend = replace(frontend, security=own)
        for name, port in (
            ("scheduler_port", scheduler_port),
            ("scheduler_metrics_port", metrics_port or 0),
            ("worker_metrics_port", worker_metrics_port or 0),
        ):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name} is {port}, must be between 0 and 65535", field=name)
        frontend = _with_private_grpc(frontend)
        wanted = (
            ("port", frontend.host, frontend.port),
            ("grpc_port", frontend.grpc_host or frontend.host, frontend.grpc_port),
            ("scheduler_port", LOOPBACK, scheduler_port),
            ("scheduler_metrics_port", LOOPBACK, metrics_port or 0),
            ("worker_metrics_port", LOOPBACK, worker_metrics_port or 0),
        )
        for name, host, port in wanted:
            if port and not can_listen(host, port):
                message = f"{name} is {port}, must be free on {host}: something listens there, or it is not allowed"
                raise ConfigError(message, field=name)
        frontend = replace(
            frontend,
            port=frontend.port or free_port(frontend.host),
            grpc_port=frontend.grpc_port or free_port(frontend.grpc_host or frontend.host),
            scheduler=f"{LOOPBACK}:{scheduler_port or free_port()}",
        )
        return cls(engine=engine, frontend=frontend, metrics_port=metrics_port, worker_metrics_port=worker_metrics_port)

    def for_this_process(self) -> Self:
        """The same without TLS and with a key that others do not know, for a command that is its only client."""
        key = secrets.token_hex(24)
        frontend = replace(
            self.frontend, api_key=(key,), grpc_host=LOOPBACK, ssl_keyfile=None, ssl_certfile=None, ssl_ca_certs=None
        )
        return replace(self, frontend=frontend)

    @property
    def host(self) -> str:
        """Where this machine reaches the frontend."""
        return _within_reach(self.frontend.host)

    @property
    def grpc_address(self) -> str:
        """Where this machine reaches the public gRPC service."""
        return f"{_within_reach(self.frontend.grpc_host or self.frontend.host)}:{self.frontend.grpc_port}"

    @property
    def url(self) -> str:
        """URL of the HTTP server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.frontend.ssl_certfile else 'http'}://{host}:{self.frontend.port}"

    @property
    def model_name(self) -> str:
        """The name that clients use for the model."""
        return next(iter(self.frontend.served_model_name), self.frontend.model)

    def services(self) -> tuple[Service, ...]:
        """In the order in which they are to end: who takes requests first, who computes them last."""
        address, drain_s = self.frontend.scheduler, self.frontend.drain_timeout_s
        listen = [f"--host={LOOPBACK}", f"--port={address.rpartition(':')[2]}", f"--drain-timeout={drain_s}"]
        if self.metrics_port is not None:
            listen.append(f"--metrics-port={self.metrics_port}")
        engine = engine_config_to_argv(with_standby(self.engine))
        stop_timeout_s = drain_s + DRAIN_MARGIN_S
        frontend = frontend_config_to_argv(replace(self.frontend, api_key=(), operator_key=()))
        given = {API_KEY_VARIABLE: self.frontend.api_key, OPERATOR_KEY_VARIABLE: self.frontend.operator_key}
        keys = {variable: "\n".join(values) for variable, values in given.items() if values}
        token = token_environment(self.engine.security)
        return (
            Service(
                name="frontend",
                command=tuple(service_command("pagoda_frontend", frontend)),
                stop_timeout_s=stop_timeout_s,
                environment={**keys, **token},
            ),
            Service(
                name="scheduler",
                command=tuple(service_command("pagoda_scheduler", [*listen, *engine])),
                stop_timeout_s=stop_timeout_s,
                environment=token,
            ),
            *worker_services(
                self.engine,
                scheduler=address,
                host=LOOPBACK,
                drain_timeout_s=drain_s,
                stop_timeout_s=stop_timeout_s,
                metrics_port=self.worker_metrics_port,
            ),
        )

    async def wait_until_ready(self, on_reason: Callable[[str], None] | None = None) -> None:
        """Return when /ready answers 200. Waits forever: the caller watches something else besides.

        Args:
            on_reason: called with the reason why it is not ready, whenever the reason changes.
        """
        told = ""
        while (reason := await self._look()) is not None:
            if reason not in ("", told) and on_reason is not None:
                on_reason(reason)
                told = reason
            await asyncio.sleep(READY_POLL_S)

    async def _look(self) -> str | None:
        """As in `_not_ready_reason`. A frontend that requires client certificates refuses this probe; then the engine
        is asked, and the frontend only has to listen."""
        if self.frontend.ssl_ca_certs is None:
            return await asyncio.to_thread(self._not_ready_reason)
        reason = await not_ready_reason(self.frontend.scheduler, security=self.engine.security)
        if reason is not None:
            return reason
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(self.host, self.frontend.port)
            writer.close()
            return None
        return ""

    def _not_ready_reason(self) -> str | None:
        """None when it is ready; empty when no one answers."""
        connection = http.client.HTTPConnection(self.host, self.frontend.port, timeout=5)
        if self.frontend.ssl_certfile:  # our own child: its certificate is for others, and may name another host
            trusting = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(self.host, self.frontend.port, timeout=5, context=trusting)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError),
        ):
            connection.request("GET", "/ready")
            response = connection.getresponse()
            return None if response.status == 200 else str(json.load(response)["error"]["message"])
        return ""


def _within_reach(host: str) -> str:
    return LOOPBACK if host in ("0.0.0.0", "", "::") else host


def _with_private_grpc(frontend: FrontendConfig) -> FrontendConfig:
    """`frontend` with gRPC on loopback where it would be plaintext over a network.

    HTTP is served wherever --host says, as people expect of it; gRPC is not what they asked for.
    """
    if frontend.grpc_host is not None:
        return frontend
    try:
        frontend.public_grpc.check_listen(frontend.host)
    except ConfigError:
        logger.warning("gRPC is served on %s only: %s", LOOPBACK, PLAINTEXT_ADVICE)
        return replace(frontend, grpc_host=LOOPBACK)
    return frontend
