"""GET /metrics of the scheduler and the worker, as Prometheus asks for it."""

import errno
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, Gauge

from pagoda_common.metrics.server import CONTENT_TYPE, serve_metrics

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
ESCAPED = "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6"


@pytest.mark.parametrize("accept", ["*/*", "text/plain", OPEN_METRICS, ESCAPED])
def test_names_keep_their_colon_whatever_is_accepted(accept: str) -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_waiting", "Waiting.", registry=registry).set(3)
    port = serve_metrics(registry, host="127.0.0.1", port=0)
    with urlopen(Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept}), timeout=240) as response:
        assert "vllm:num_requests_waiting 3.0" in response.read().decode().splitlines()
        assert response.headers["Content-Type"] == CONTENT_TYPE


def test_a_port_that_is_taken_is_an_error() -> None:
    port = serve_metrics(CollectorRegistry(), host="127.0.0.1", port=0)
    with pytest.raises(OSError, match="in use"):
        serve_metrics(CollectorRegistry(), host="127.0.0.1", port=port)


def test_metrics_are_served_on_addresses_of_both_kinds() -> None:
    try:
        port = serve_metrics(CollectorRegistry(), host="::1", port=0)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        pytest.skip("there is no IPv6 here")
    with urlopen(f"http://[::1]:{port}/metrics", timeout=240) as response:
        assert response.status == 200
