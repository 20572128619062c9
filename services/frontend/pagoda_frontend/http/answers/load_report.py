"""The load of the engine in a header of answers, for load balancers that read ORCA reports (xds.data.orca.v3)."""

import json
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.v1 import types_pb2

FORMAT_HEADER = "endpoint-load-metrics-format"
"""Header of a request: TEXT or JSON asks for a report; other values do not."""
REPORT_HEADER = "endpoint-load-metrics"


class LoadReports:
    """Adds a load report to the head of each answer whose request asks for it."""

    def __init__(self, app: ASGIApp, *, load: Callable[[Scope], types_pb2.EngineLoad]) -> None:
        """`load` is called for every report, with the scope of its call."""
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        form = Headers(scope=scope).get(FORMAT_HEADER, "").upper() if scope["type"] == "http" else ""
        if form not in ("TEXT", "JSON"):
            await self._app(scope, receive, send)
            return

        async def send_with_report(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPORT_HEADER] = load_report(self._load(scope), form)
            await send(message)

        await self._app(scope, receive, send_with_report)


def load_report(load: types_pb2.EngineLoad, form: str) -> str:
    """The value of the header, with vLLM's names of the figures.

    Args:
        form: TEXT or JSON.
    """
    usage = load.num_used_blocks / load.num_total_blocks if load.num_total_blocks else 0.0
    figures = {"kv_cache_usage_perc": usage, "num_requests_waiting": float(load.num_waiting_reqs)}
    if form == "JSON":
        return "JSON " + json.dumps({"named_metrics": figures})
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())
