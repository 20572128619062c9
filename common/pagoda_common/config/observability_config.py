"""ObservabilityConfig: log lines, traces and connection statistics. The same for all three services."""

from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from pagoda_common.errors import ConfigError

LogFormat: TypeAlias = Literal["text", "json"]
DETAILS = ("model", "worker", "all")
"""Values of collect_detailed_traces, as in vLLM; all of them mean the worker's part of each step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservabilityConfig:
    """Logs, traces and connections of one service."""

    log_format: LogFormat = "text"
    """text is a line for people, json an object a line for collectors."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (gRPC) that spans are sent to; None makes no spans."""
    collect_detailed_traces: tuple[str, ...] = ()
    """Worker time in the traces: spans for its share of each prefill chunk."""
    enable_channelz: bool = False
    """Serve grpc.channelz.v1: open channels, sockets and their counters. They show addresses of peers."""

    disable_log_stats: bool = False
    """Log no line of statistics every ten seconds of load."""

    def __post_init__(self) -> None:
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not urlsplit(endpoint).netloc:
            message = f"otlp_traces_endpoint is {endpoint!r}, must be a URL such as http://localhost:4317"
            raise ConfigError(message, field="otlp_traces_endpoint")
        for given in (name for names in self.collect_detailed_traces for name in names.split(",")):
            if given not in DETAILS:
                message = f"collect_detailed_traces is {given!r}, must be one of {', '.join(DETAILS)}"
                raise ConfigError(message, field="collect_detailed_traces")
        if self.collect_detailed_traces and endpoint is None:
            message = "collect_detailed_traces needs otlp_traces_endpoint"
            raise ConfigError(message, field="collect_detailed_traces")
