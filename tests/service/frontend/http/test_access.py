"""Who may call, under which id, with how much before the first line of a body."""

import asyncio
import shutil
import socket
import ssl
import struct
import subprocess
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ConfigError
from pagoda_frontend.http.connection.http_protocol import BoundedHttpProtocol
from pagoda_frontend.http.server import FrontendServer
from tests.harness.certificates import make_certificates
from tests.service.frontend.harness import MODEL, Running, running_frontend, until


async def test_keys_come_from_flag_and_file_and_open_http_and_grpc(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\n  second  \n")
    async with running_frontend(api_key=("ключ",), api_key_file=str(file)) as running:
        for key in ("first", "second", "ключ"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert (await running.http.get("/v1/models", headers=headers)).status_code == 200
        for headers in ({}, {"Authorization": b"Bearer # of the team"}, {"x-api-key": b"first"}):
            assert (await running.http.get("/v1/models", headers=headers)).status_code == 401
        stub: Any = inference_pb2_grpc.InferenceStub(running.channel)
        request = inference_pb2.GenerateRequest(text="hello")
        for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", "first"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GenerateUnary(request, metadata=metadata)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request, metadata=metadata).read()
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        answer = await stub.GenerateUnary(request, metadata=(("authorization", "Bearer second"),))
        assert answer.outputs[0].token_ids
        health: Any = health_pb2_grpc.HealthStub(running.channel)
        status = (await health.Check(health_pb2.HealthCheckRequest())).status
        assert status != health_pb2.HealthCheckResponse.UNKNOWN  # SERVING or about to be: readiness is polled
        nowhere = running.channel.unary_unary("/package.Unknown/Method")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await nowhere(b"")
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED, "open is only what is known to be"


GUARDED = ("/v1", "/v2", "/invocations", "/pooling", "/classify", "/score", "/rerank")
"""Paths that need a key."""


async def test_a_root_path_opens_no_door() -> None:
    for root_path in ("/api", "/v", "/api/"):
        async with running_frontend(api_key=("secret",), root_path=root_path) as running:
            for path in ("/v1/models", "/api/v1/models", "/%761/models", "/invocations"):
                assert (await running.http.get(path)).status_code in (401, 404), (root_path, path)
            headers = {"Authorization": "Bearer secret"}
            assert (await running.http.get("/v1/models", headers=headers)).status_code == 200
            paths = (await running.http.get("/openapi.json")).json()["paths"]
            guarded = {path for path, methods in paths.items() if any("security" in one for one in methods.values())}
            assert guarded == {path for path in paths if path.startswith(GUARDED)}
            if root_path == "/api":
                assert (await running.http.get("/api/v1/models", headers=headers)).status_code == 200
                document = (await running.http.get("/openapi.json")).json()
                assert document["servers"] == [{"url": "/api"}]


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    for name in (str(file), str(tmp_path / "missing")):
        with pytest.raises(ConfigError, match="api_key_file"):
            FrontendServer(config=FrontendConfig(api_key_file=name))


async def test_every_response_has_a_request_id_the_clients_own_if_it_gave_one(frontend: Running) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        response = await frontend.http.get(path, headers={"X-Request-Id": "trace-1"})
        assert response.headers.get_list("x-request-id") == ["trace-1"]
    for path in ("/v1/models", "/nowhere"):
        assert len((await frontend.http.get(path)).headers["x-request-id"]) == 32
    for path in ("/live", "/health", "/metrics"):
        assert "x-request-id" not in (await frontend.http.get(path)).headers
    body = {"model": MODEL, "prompt": [5], "max_tokens": 1}
    response = await frontend.post("/v1/completions", body, headers={"X-Request-Id": "a\tb" + "c" * 500})
    assert response.headers["x-request-id"] == "a_b" + "c" * 125
    response = await frontend.post("/v1/completions", body)
    assert response.headers["x-request-id"] == response.json()["id"]


async def test_probes_have_a_drawn_request_id_where_it_is_asked_for() -> None:
    async with running_frontend(enable_request_id_headers=True) as frontend:
        assert len((await frontend.http.get("/health")).headers["x-request-id"]) == 32


async def _raw(running: Running, *parts: bytes) -> bytes:
    """All that the server answers to bytes on a connection, until it closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(240):
            return await reader.read()
    finally:
        writer.close()


async def test_heads_that_are_too_large_get_431_and_lose_the_connection() -> None:
    async with running_frontend(h11_max_incomplete_event_size=4096, h11_max_header_count=20) as running:
        start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        many = b"".join(b"A%d: 1\r\n" % number for number in range(40))
        for parts in ((start, many, b"\r\n"), (start, b"A: ", b"a" * 5000), (b"GET /" + b"a" * 5000,)):
            answer = await _raw(running, *parts)
            assert answer.startswith(b"HTTP/1.1 431 "), answer
            assert b'"code":431' in answer
        answer = await _raw(running, b"nonsense\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        # What is allowed passes, on one connection as often as one likes: the bound is for each request.
        for _ in range(3):
            headers = {"A": "a" * 2000}
            assert (await running.http.get("/health", headers=headers)).status_code == 200
            assert (await running.post("/v1/completions", {"prompt": [5] * 400, "max_tokens": 1})).status_code == 200


async def test_heads_that_do_not_end_get_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 1.0)
    monkeypatch.setattr(BoundedHttpProtocol, "open_timeout_s", 1.0)
    async with running_frontend() as running:
        for answer in await asyncio.gather(
            _raw(running), _raw(running, b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        ):
            assert answer.startswith(b"HTTP/1.1 408 "), answer
        # A body, an answer and a pause between two requests may take longer.
        running.fake.step_s = 0.05
        for _ in range(2):
            events = await running.events("/v1/completions", prompt=[5], max_tokens=24)
            assert events[-1] == "[DONE]"
            await asyncio.sleep(1.1)


GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_a_connection_stays_open_for_as_long_as_configured() -> None:
    async with running_frontend(keep_alive_timeout_s=1) as running:
        assert (await _raw(running, GET_HEALTH)).startswith(b"HTTP/1.1 200 ")  # which ends with the connection
    async with running_frontend() as running:
        assert running.server._http is not None
        assert running.server._http.config.timeout_keep_alive > 5, (
            "clients such as openai's take one that is idle for 5 s"
        )


async def test_nothing_waits_for_a_connection_that_was_reset() -> None:
    async with running_frontend() as running:
        assert running.server._http is not None
        connections = running.server._http.server_state.connections
        before = set(connections)
        with socket.create_connection(("127.0.0.1", running.server.port)) as client:
            client.sendall(GET_HEALTH)
            await until(lambda: any(_keeps_alive(connection) for connection in set(connections) - before))
            (connection,) = set(connections) - before
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
        await until(lambda: connection not in connections)
        assert not _keeps_alive(connection)


def _keeps_alive(connection: Any) -> bool:
    return connection.timeout_keep_alive_task is not None


async def test_browsers_may_do_what_the_flags_say() -> None:
    origin = "https://example.org"
    config = {"allowed_origins": (origin,), "allowed_methods": ("GET",), "allowed_headers": ("x-team",)}
    async with running_frontend(**config, allow_credentials=True) as running:
        headers = {"Origin": origin, "Access-Control-Request-Method": "GET"}
        response = await running.http.options("/v1/models", headers=headers)
        assert response.headers["access-control-allow-credentials"] == "true"
        assert response.headers["access-control-allow-methods"] == "GET"
        assert "x-team" in response.headers["access-control-allow-headers"]
        headers["Access-Control-Request-Method"] = "POST"
        assert (await running.http.options("/v1/models", headers=headers)).status_code == 400


@pytest.fixture
def certificate_files(tmp_path: Path) -> tuple[Path, Path]:
    """Key and certificate of 127.0.0.1."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subject = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    return key, certificate


async def test_https_and_grpc_show_a_new_certificate_without_a_restart(
    certificate_files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_frontend.http.connection.https.POLL_S", 0.01)
    key, certificate = certificate_files
    fresh = make_certificates(tmp_path / "fresh", "localhost")

    def shown(port: int) -> str:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=240).strip()

    async with running_frontend(ssl_keyfile=str(key), ssl_certfile=str(certificate)) as running:
        ports = running.server.port, running.server.grpc_port
        for port in ports:
            assert await asyncio.to_thread(shown, port) == certificate.read_text().strip()
        shutil.copy(fresh.path("localhost.key"), key)
        shutil.copy(fresh.path("localhost.crt"), certificate)
        async with asyncio.timeout(240):
            for port in ports:
                while await asyncio.to_thread(shown, port) != certificate.read_text().strip():  # noqa: ASYNC110 (a server)
                    await asyncio.sleep(0.01)


async def test_plaintext_grpc_is_refused_beyond_loopback() -> None:
    with pytest.raises(ConfigError, match=r"host is '0\.0\.0\.0'.*--ssl-certfile.*--grpc-host.*--insecure"):
        FrontendServer(config=FrontendConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"host is '10\.0\.0\.1'"):
        FrontendServer(config=FrontendConfig(grpc_host="10.0.0.1"))
    FrontendServer(config=FrontendConfig(host="0.0.0.0", grpc_host="127.0.0.1"))
    FrontendServer(config=FrontendConfig(host="0.0.0.0", security=SecurityConfig(insecure=True)))


async def test_https_with_a_certificate(certificate_files: tuple[Path, Path]) -> None:
    key, certificate = certificate_files
    async with running_frontend(ssl_keyfile=str(key), ssl_certfile=str(certificate)) as running:
        url = f"https://127.0.0.1:{running.server.port}"
        context = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(base_url=url, verify=context) as client:
            body = {"prompt": [5], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            await running.http.get("/health")
