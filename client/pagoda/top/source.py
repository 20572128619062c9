"""Where the figures come from: a frontend's /metrics, or a scheduler over gRPC."""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Protocol

import grpc.aio
from prometheus_client import CollectorRegistry, generate_latest

from pagoda.top.sample import Sample
from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import NotReady
from pagoda_common.metrics.engine_metrics import EngineCollector
from pagoda_common.rpc.channels import connect
from pagoda_common.rpc.service import error_from_rpc

TIMEOUT_S = 5.0


class Source(Protocol):
    """Someone to ask for figures."""

    name: str
    """For people."""

    def sample(self) -> Sample:
        """Its current metrics.

        Raises:
            NotReady: no one answers, or the answer is none.
        """

    def not_ready_reason(self) -> str:
        """Why it does not serve; empty when it does.

        Raises:
            NotReady: no one answers.
        """


class FrontendSource:
    """A frontend's HTTP server."""

    def __init__(self, *, url: str) -> None:
        self.name = url.rstrip("/").removesuffix("/v1")

    def sample(self) -> Sample:
        """Its /metrics, which have the engine's."""
        try:
            return Sample.parse(self._get("/metrics"), at_s=time.monotonic())
        except ValueError as error:
            raise NotReady(f"{self.name}/metrics is no Prometheus text: {error}") from None

    def not_ready_reason(self) -> str:
        """Its /ready."""
        try:
            self._get("/ready")
        except NotReady as error:
            return error.message
        return ""

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.name + path, timeout=TIMEOUT_S) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            raise NotReady(_message(error) or f"{self.name}{path} answers {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NotReady(f"no answer from {self.name}: {error}") from None


class SchedulerSource:
    """A scheduler's gRPC service."""

    def __init__(self, *, address: str, security: SecurityConfig) -> None:
        """Raises ConfigError when `security` does not let it be asked."""
        self.name = address
        security.check_dial(address, name="scheduler")
        self._security = security
        self._runner = asyncio.Runner()
        self._stub: scheduler_pb2_grpc.SchedulerAsyncStub | None = None
        self._reason = ""

    def sample(self) -> Sample:
        """GetMetrics, and GetLoad under the names that a frontend has for it."""
        text, load = self._runner.run(self._ask())
        at_s = time.monotonic()
        self._reason = "" if load.is_ready else load.not_ready_reason or "the engine is starting"
        model_name = Sample.parse(text.decode(), at_s=at_s).label("vllm:iteration_tokens_total_count", "model_name")
        registry = CollectorRegistry()
        registry.register(EngineCollector(load=lambda: load, model_name=model_name))
        return Sample.parse((text + generate_latest(registry)).decode(), at_s=at_s)

    def not_ready_reason(self) -> str:
        """The answer of GetLoad."""
        return self._reason

    async def _ask(self) -> tuple[bytes, types_pb2.EngineLoad]:
        if self._stub is None:
            self._stub = scheduler_pb2_grpc.SchedulerStub(connect(self.name, security=self._security))
        try:
            metrics = await self._stub.GetMetrics(scheduler_pb2.GetMetricsRequest(), timeout=TIMEOUT_S)
            return metrics.text, await self._stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise NotReady(f"no answer from {self.name}: {error_from_rpc(error).message}") from None


def _message(error: urllib.error.HTTPError) -> str:
    """The reason in the answer of a frontend that is not ready."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
