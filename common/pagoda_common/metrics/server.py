"""GET /metrics for a process without an HTTP server."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pagoda_common.errors import CannotListen

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The one format that is served, whatever the scraper accepts. prometheus_client's own server answers one that accepts
OpenMetrics, as Prometheus does, with vllm_num_requests_waiting for vllm:num_requests_waiting: queries find nothing."""


class _AllOf(Collector):
    """The metrics of another registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape."""
        yield from self._registry.collect()


def process_registry(registry: CollectorRegistry) -> CollectorRegistry:
    """A registry with the metrics of `registry` and with those of this process: memory, CPU, garbage collection."""
    whole = CollectorRegistry()
    ProcessCollector(registry=whole)
    PlatformCollector(registry=whole)
    GCCollector(registry=whole)
    whole.register(_AllOf(registry))
    return whole


def serve_metrics(registry: CollectorRegistry, *, host: str, port: int) -> int:
    """Serve GET /metrics on a thread of its own; the bound port.

    Raises:
        CannotListen: the address cannot be bound.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = generate_latest(registry)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape is no news."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        fault = CannotListen(f"cannot serve metrics on {host}:{port}: {error.strerror}")
        fault.errno = error.errno
        raise fault from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)
