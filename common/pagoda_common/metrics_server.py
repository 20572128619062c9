"""GET /metrics of a process that has no HTTP server of its own."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class _AllOf(Collector):
    """What another registry has."""

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
        OSError: the address cannot be bound.
    """
    server, _ = start_http_server(port, addr=host, registry=registry)
    return int(server.server_port)
