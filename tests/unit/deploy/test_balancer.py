"""What HAProxy is told: whom it asks, what it tries again, how long it waits. Starts nothing."""

import re
from pathlib import Path

import pytest

from pagoda_common.config.frontend_config import FrontendConfig

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "deploy" / "balancer" / "haproxy.cfg").read_text()


def sections(*, tls: bool) -> dict[str, list[str]]:
    """Lines by section, as HAProxy reads them with or without the variable TLS."""
    found: dict[str, list[str]] = {}
    name, is_read = "", True
    for raw in TEXT.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("."):
            is_read = {".if defined(TLS)": tls, ".else": not is_read, ".endif": True}[line]
        elif is_read and not raw.startswith(" "):
            name = line
            found[name] = []
        elif is_read:
            found[name].append(line)
    return found


PLAIN, TLS = sections(tls=False), sections(tls=True)


def timeouts(section: str) -> dict[str, str]:
    return dict(re.findall(r"^timeout (\S+) (\S+)$", "\n".join(PLAIN[section]), re.MULTILINE))


def test_a_frontend_that_has_not_begun_a_request_is_replaced_by_another() -> None:
    defaults = PLAIN["defaults"]
    assert "mode http" in defaults
    assert "option redispatch 1" in defaults
    assert "retries 3" in defaults
    # Nothing else: what a frontend has begun must not be done twice.
    assert [line for line in defaults if line.startswith("retry-on")] == ["retry-on conn-failure empty-response 503"]
    assert "balance leastconn" in defaults
    assert "option abortonclose" in defaults, "a client that leaves ends its request"


def test_it_waits_as_long_as_a_frontend_would() -> None:
    waits = timeouts("defaults")
    assert waits == {
        "connect": "2s",
        "client": "1h",
        "server": "1h",
        "http-request": "30s",
        "http-keep-alive": f"{FrontendConfig().keep_alive_timeout_s}s",
        "check": "3s",
    }
    (stop,) = re.findall(r"^    hard-stop-after (\d+)s$", TEXT, re.MULTILINE)
    assert FrontendConfig().drain_timeout_s < int(stop) < 45, "the grace period of compose.yaml"
    assert "maxconn 4096" in PLAIN["global"]


@pytest.mark.parametrize("found", [PLAIN, TLS], ids=["plain", "tls"])
@pytest.mark.parametrize(("backend", "port"), [("http_frontends", 8000), ("grpc_frontends", 50051)])
def test_frontends_are_found_by_name_and_asked_whether_they_are_ready(
    found: dict[str, list[str]], backend: str, port: int
) -> None:
    lines = found[f"backend {backend}"]
    assert f"server-template frontend 8 frontend:{port}" in lines
    assert "option httpchk" in lines
    assert "http-check send meth GET uri /ready" in lines
    assert 'http-check expect ! string "shutting down"' in lines
    (how,) = [line for line in lines if line.startswith("default-server check")]
    assert how.startswith("default-server check inter 1s fall 2 rise 1 resolvers docker init-addr none")
    assert how.endswith(" proto h2") is (port == 50051)
    checks = [line for line in lines if line.startswith("http-check connect")]
    assert all("port 8000" in line for line in checks), "health is asked over HTTP"
    assert len(checks) == (port == 50051)


def test_the_sentence_that_it_looks_for_is_the_frontend_s() -> None:
    sources = (ROOT / "services/frontend/pagoda_frontend").rglob("*.py")
    assert any("shutting down" in path.read_text() for path in sources)


def test_ports_outside_lead_to_their_backends_and_speak_tls_where_it_is_on() -> None:
    certificate = "ssl crt /run/secrets/tls.crt alpn h2"
    assert PLAIN["frontend http"] == ["bind :8000", "default_backend http_frontends"]
    assert TLS["frontend http"] == [f"bind :8000 {certificate},http/1.1", "default_backend http_frontends"]
    assert PLAIN["frontend grpc"] == ["bind :50051 proto h2", "default_backend grpc_frontends"]
    assert TLS["frontend grpc"] == [f"bind :50051 {certificate} proto h2", "default_backend grpc_frontends"]
    assert not any("ssl" in line for name in PLAIN if name.startswith("backend") for line in PLAIN[name])
    for backend in ("http_frontends", "grpc_frontends"):
        (how,) = [line for line in TLS[f"backend {backend}"] if line.startswith("default-server ssl")]
        assert "verify required ca-file /run/secrets/ca.crt verifyhost frontend sni str(frontend)" in how


def test_its_own_port_tells_health_and_metrics_and_nothing_else() -> None:
    assert PLAIN["frontend own"] == [
        "bind :8404",
        "monitor-uri /ready",
        "monitor fail if { nbsrv(http_frontends) lt 1 } or { nbsrv(grpc_frontends) lt 1 }",
        "http-request use-service prometheus-exporter if { path /metrics }",
        "http-request return status 404",
    ]


def test_names_are_looked_up_in_docker_s_dns_every_second() -> None:
    assert PLAIN["resolvers docker"] == [
        "nameserver dns 127.0.0.11:53",
        "accepted_payload_size 8192",
        "timeout resolve 1s",
        "timeout retry 1s",
        "hold valid 1s",
        "hold nx 5s",
        "hold obsolete 2s",
    ]
