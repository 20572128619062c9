"""The health probe of the images: its exit code, and what it says."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pagoda_common.rpc import health_probe
from pagoda_common.rpc.service import LIVENESS, RpcServer
from tests.harness.certificates import make_certificates

SERVICE = "pagoda.v1.Probed"


async def probe(monkeypatch: pytest.MonkeyPatch, address: str, *words: str) -> int:
    """Exit code of ``pagoda-health ADDRESS …``."""
    monkeypatch.setattr(sys, "argv", ["pagoda-health", address, *words])
    return await asyncio.to_thread(health_probe.main)


async def test_the_exit_code_follows_the_health(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = RpcServer(services=(SERVICE,))
    address = f"127.0.0.1:{await server.start(host='127.0.0.1', port=0)}"
    assert await probe(monkeypatch, address) == 1
    assert await probe(monkeypatch, address, "--service", LIVENESS) == 0
    await server.set_serving(True)
    assert await probe(monkeypatch, address) == 0
    assert await probe(monkeypatch, address, "--service", SERVICE) == 0
    assert capsys.readouterr().out.split() == ["NOT_SERVING", "SERVING", "SERVING", "SERVING"]
    assert await probe(monkeypatch, address, "--service", "nobody") == 1
    assert "NOT_FOUND" in capsys.readouterr().err
    await server.stop(grace_s=0)
    assert await probe(monkeypatch, address, "--timeout", "0.5") == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_the_request_is_the_message_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    class Channel:
        def __enter__(self) -> "Channel":
            return self

        def __exit__(self, *_: object) -> None: ...

        def unary_unary(self, method: str) -> Callable[..., bytes]:
            assert method == health_probe.CHECK
            return self.answer

        def answer(self, request: bytes, timeout: float) -> bytes:
            sent.append(request)
            return health_pb2.HealthCheckResponse(status="NOT_SERVING").SerializeToString()

    monkeypatch.setattr(grpc, "insecure_channel", lambda address: Channel())
    name = "s" * 300  # its length takes two bytes
    assert health_probe.check("somewhere:1", service=name) == "NOT_SERVING"
    assert health_pb2.HealthCheckRequest.FromString(sent[0]).service == name


def test_a_file_of_tls_that_is_missing_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGODA_TLS_CA", "/nowhere/ca.crt")
    monkeypatch.setattr(sys, "argv", ["pagoda-health", "127.0.0.1:1"])
    assert health_probe.main() == 1
    assert "/nowhere/ca.crt" in capsys.readouterr().err


async def test_a_service_with_tls_is_asked_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    certificates = make_certificates(tmp_path, "pagoda-worker")
    server = RpcServer(services=(SERVICE,), security=certificates.config("pagoda-worker").server)
    address = f"127.0.0.1:{await server.start(host='127.0.0.1', port=0)}"
    await server.set_serving(True)
    for name, file in (("CA", "ca.crt"), ("CERT", "pagoda-worker.crt"), ("KEY", "pagoda-worker.key")):
        monkeypatch.setenv(f"PAGODA_TLS_{name}", certificates.path(file))
    monkeypatch.setenv("PAGODA_TLS_SERVER_NAME", "of-another-server")
    assert await probe(monkeypatch, address, "--tls-server-name=pagoda-worker") == 0
    assert capsys.readouterr().out.split() == ["SERVING"]
    assert await probe(monkeypatch, address, "--tls-server-name=pagoda-scheduler") == 1
    monkeypatch.delenv("PAGODA_TLS_CA")
    assert await probe(monkeypatch, address) == 1
    await server.stop(grace_s=0)
