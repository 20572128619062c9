"""Where the figures come from: a frontend's /metrics, or a scheduler over gRPC."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Protocol

import grpc
from prometheus_client import CollectorRegistry, generate_latest

from pagoda.top.sample import Sample
from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.engine_metrics import EngineCollector
from pagoda_common.errors import NotReady
from pagoda_common.rpc import CHANNEL_OPTIONS, error_from_rpc

TIMEOUT_S = 5.0


class Source(Protocol):
    """Somebody to ask for figures."""

    name: str
    """For people."""

    def sample(self) -> Sample:
        """What its metrics are now.

        Raises:
            NotReady: nobody answers, or the answer is none.
        """

    def not_ready_reason(self) -> str:
        """Why it does not serve; empty when it does.

        Raises:
            NotReady: nobody answers.
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

    def __init__(self, *, address: str) -> None:
        self.name = address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)

    def sample(self) -> Sample:
        """GetMetrics, and GetLoad under the names that a frontend has for it."""
        try:
            text = self._stub.GetMetrics(scheduler_pb2.GetMetricsRequest(), timeout=TIMEOUT_S).text
            load = self._stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise NotReady(f"no answer from {self.name}: {error_from_rpc(error).message}") from None
        at_s = time.monotonic()
        model_name = Sample.parse(text.decode(), at_s=at_s).label("vllm:iteration_tokens_total_count", "model_name")
        registry = CollectorRegistry()
        registry.register(EngineCollector(load=lambda: load, model_name=model_name))
        return Sample.parse((text + generate_latest(registry)).decode(), at_s=at_s)

    def not_ready_reason(self) -> str:
        """What GetLoad says."""
        try:
            load = self._stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"no answer from {self.name}: {error_from_rpc(error).message}"
        return "" if load.is_ready else load.not_ready_reason or "the engine is starting"


def _message(error: urllib.error.HTTPError) -> str:
    """What an answer of a frontend that is not ready says."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
