"""How a service tells what it does: its log lines, its connections. The same for all three services."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservabilityConfig:
    """Logs and connections of one service."""

    log_format: LogFormat = "text"
    """text is a line for people, json an object a line for collectors."""
    enable_channelz: bool = False
    """Serve grpc.channelz.v1: open channels, sockets and their counters. They show addresses of peers."""
