"""Mutual TLS and service tokens on our own servers and channels, over real sockets."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagoda import AsyncLLM
from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.config.security_config import SecurityConfig, ServerSecurity
from pagoda_common.errors import ConfigError
from pagoda_common.rpc.bearer import BearerKeys
from pagoda_common.rpc.channels import Connection, connect, connect_blocking
from pagoda_common.rpc.credentials import ClientCredentials
from pagoda_common.rpc.local_socket import new_local_address
from pagoda_common.rpc.service import MAX_METADATA_BYTES, RpcServer
from tests.harness.certificates import Certificates, make_certificates

CODES = grpc.StatusCode
SETTINGS, PING, GOAWAY = 4, 6, 7
"""Types of HTTP/2 frames."""
TOKEN, OTHER_TOKEN = "a-token-of-enough-characters", "another-one-of-enough-characters"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"), "scheduler", "frontend")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The same names from an authority that no one here trusts."""
    return make_certificates(tmp_path_factory.mktemp("strangers"), "scheduler", "frontend")


@pytest.fixture
def certificates(made: Certificates, tmp_path: Path) -> Certificates:
    """A copy that a test may change."""
    shutil.copytree(made.directory, tmp_path, dirs_exist_ok=True)
    return Certificates(tmp_path)


class EchoScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Answers GetMetrics with the nickname that the call shows or the name in the caller's certificate, and every
    message of a Session with one."""

    async def GetMetrics(
        self, request: scheduler_pb2.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetMetricsResponse:
        names = context.auth_context().get("x509_common_name", [b"no certificate"])
        nickname = dict(context.invocation_metadata() or ()).get("nickname", "")
        return scheduler_pb2.GetMetricsResponse(text=str(nickname).encode() or names[0])

    async def Session(
        self, request_iterator: AsyncIterator[scheduler_pb2.FrontendMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.SchedulerMessage]:
        async for _ in request_iterator:
            yield scheduler_pb2.SchedulerMessage()


@asynccontextmanager
async def running_server(security: ServerSecurity, *, local_address: str | None = None) -> AsyncIterator[str]:
    """Its address on loopback."""
    server = RpcServer(services=("pagoda.v1.Scheduler",), security=security)
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(EchoScheduler(), server.grpc_server)
    port = await server.start(host="127.0.0.1", port=0, local_address=local_address)
    await server.set_serving(True)
    yield f"127.0.0.1:{port}"
    await server.stop(grace_s=0)


async def call(channel: grpc.aio.Channel, **options: object) -> str:
    """What GetMetrics answers over `channel`: the caller's name, or the status and its details."""
    stub = scheduler_pb2_grpc.SchedulerStub(channel)
    try:
        answer = await stub.GetMetrics(scheduler_pb2.GetMetricsRequest(), timeout=240, **options)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return answer.text.decode()


async def ask(address: str, security: SecurityConfig | None = None) -> str:
    """The same over a channel of its own."""
    async with connect(address, security=security) as channel:
        return await call(channel)


def blocking_health(address: str, security: SecurityConfig) -> int:
    """What a program without asyncio is told."""
    with connect_blocking(address, security=security) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=240).status


async def test_who_has_a_certificate_of_the_authority_is_served(certificates: Certificates) -> None:
    async with running_server(certificates.config("scheduler").server) as address:
        assert await ask(address, certificates.config("frontend")) == "frontend"


async def test_plaintext_and_clients_without_a_certificate_are_refused(certificates: Certificates) -> None:
    async with running_server(certificates.config("scheduler").server) as address:
        assert (await ask(address)).startswith("UNAVAILABLE")
        assert (await ask(address, SecurityConfig(tls_ca=certificates.path("ca.crt")))).startswith("UNAVAILABLE")


async def test_certificates_of_another_authority_are_refused_by_either_side(
    certificates: Certificates, strangers: Certificates
) -> None:
    client = certificates.config("frontend")
    async with running_server(certificates.config("scheduler").server) as address:
        stranger = replace(strangers.config("frontend"), tls_ca=certificates.path("ca.crt"))
        assert (await ask(address, stranger)).startswith("UNAVAILABLE")
    async with running_server(strangers.config("scheduler").server) as address:
        assert "CERTIFICATE_VERIFY_FAILED" in await ask(address, client)


async def test_a_server_must_have_the_name_that_was_dialled_or_is_asked_for(certificates: Certificates) -> None:
    certificates.make("elsewhere")
    async with running_server(certificates.config("scheduler").server) as address:
        assert await ask(address, certificates.config("frontend", server_name="scheduler")) == "frontend"
        refused = await ask(address, certificates.config("frontend", server_name="worker"))
        assert refused.startswith("UNAVAILABLE")


async def test_a_new_certificate_is_shown_to_new_connections_without_a_restart(
    certificates: Certificates, strangers: Certificates
) -> None:
    old = certificates.config("frontend")
    async with (
        running_server(certificates.config("scheduler").server) as address,
        connect(address, security=old) as open_,
    ):
        assert await call(open_) == "frontend"
        for file in ("ca.crt", "scheduler.crt", "scheduler.key"):
            shutil.copy(strangers.path(file), certificates.path(file))
        assert await ask(address, strangers.config("frontend")) == "frontend"
        assert (await ask(address, certificates.config("frontend"))).startswith("UNAVAILABLE")
        assert await call(open_) == "frontend", "a connection that is open goes on"


async def test_half_replaced_files_leave_the_old_certificate_in_use(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server(certificates.config("scheduler").server) as address:
        shutil.copy(certificates.path("frontend.key"), certificates.path("scheduler.key"))
        assert await ask(address, certificates.config("frontend")) == "frontend"
        assert "what was read before stays in use" in caplog.text
        shutil.copy(certificates.path("frontend.crt"), certificates.path("scheduler.crt"))
        assert await ask(address, certificates.config("frontend")) == "frontend"


async def test_a_connection_takes_up_a_new_certificate_when_it_is_renewed(certificates: Certificates) -> None:
    async with running_server(certificates.config("scheduler").server) as address:
        connection = Connection(address, security=certificates.config("frontend"))
        first = connection.renew()
        assert await call(first) == "frontend"
        assert connection.renew() is first
        stream = scheduler_pb2_grpc.SchedulerStub(first).Session(timeout=240)
        await stream.write(scheduler_pb2.FrontendMessage())
        assert isinstance(await stream.read(), scheduler_pb2.SchedulerMessage)
        for end in ("crt", "key"):
            shutil.copy(certificates.path(f"scheduler.{end}"), certificates.path(f"frontend.{end}"))
        assert await call(connection.renew()) == "scheduler"
        assert connection.channel is not first
        await stream.write(scheduler_pb2.FrontendMessage())  # what runs over the old one may end
        assert isinstance(await stream.read(), scheduler_pb2.SchedulerMessage)
        stream.cancel()
        await connection.close()


async def test_public_ports_ask_clients_for_a_certificate_only_when_told_to(certificates: Certificates) -> None:
    own = certificates.config("scheduler").server
    anybody = SecurityConfig(tls_ca=certificates.path("ca.crt"))
    async with running_server(replace(own, client_ca_file=None)) as address:
        assert await ask(address, anybody) == "no certificate"
        assert await asyncio.to_thread(blocking_health, address, anybody) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("shown", "is_served"), [(TOKEN, True), (OTHER_TOKEN, True), (TOKEN[:-1] + "x", False), ("", False)]
)
async def test_a_service_token_opens_every_call(tmp_path: Path, shown: str, is_served: bool) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# of today, and of yesterday\n{TOKEN}\n{OTHER_TOKEN}\n")
    async with (
        running_server(SecurityConfig(service_token_file=str(file)).server) as address,
        connect(address, security=SecurityConfig(service_token=shown)) as channel,
    ):
        answer = await call(channel)
        if is_served:
            assert answer == "no certificate"
        else:
            assert answer.startswith("UNAUTHENTICATED: the call has no valid service token")
        session = scheduler_pb2_grpc.SchedulerStub(channel).Session(timeout=240)
        await session.write(scheduler_pb2.FrontendMessage())
        if is_served:
            assert isinstance(await session.read(), scheduler_pb2.SchedulerMessage)
            session.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                await session.read()
            assert await session.code() is CODES.UNAUTHENTICATED


async def test_a_call_shows_its_own_metadata_beside_the_token() -> None:
    config = SecurityConfig(service_token=TOKEN)
    async with running_server(config.server) as address, connect(address, security=config) as channel:
        assert await call(channel, metadata=(("nickname", "mine"),)) == "mine"


async def test_a_token_is_looked_at_once_a_stream_however_many_messages_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    accepted = BearerKeys.accepted

    def count(self: BearerKeys, headers: object, **options: object) -> object:
        looked.append(headers)
        return accepted(self, headers, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(BearerKeys, "accepted", count)
    guarded = SecurityConfig(service_token=TOKEN)
    async with running_server(guarded.server) as address, connect(address, security=guarded) as channel:
        session = scheduler_pb2_grpc.SchedulerStub(channel).Session(timeout=240)
        for _ in range(50):
            await session.write(scheduler_pb2.FrontendMessage())
            assert isinstance(await session.read(), scheduler_pb2.SchedulerMessage)
        session.cancel()
    assert len(looked) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
async def test_an_abstract_socket_asks_for_the_same_token() -> None:
    guarded, address = SecurityConfig(service_token=TOKEN), new_local_address("scheduler")
    assert address is not None
    async with running_server(guarded.server, local_address=address) as tcp_address:
        for where in (address, tcp_address):
            async with connect(where, security=guarded) as channel:
                assert await call(channel) == "no certificate"
            async with connect(where) as channel:
                assert (await call(channel)).startswith("UNAUTHENTICATED: the call has no valid service")


async def test_there_is_no_abstract_socket_beside_tls(certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match="must not be given with TLS"):
        async with running_server(certificates.config("scheduler").server, local_address="unix-abstract:a"):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
async def test_an_abstract_socket_has_one_server() -> None:
    address = new_local_address("scheduler")
    async with running_server(ServerSecurity(), local_address=address):
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            async with running_server(ServerSecurity(), local_address=address):
                pass


async def test_health_needs_no_token_and_reflection_does() -> None:
    async with running_server(SecurityConfig(service_token=TOKEN).server) as address, connect(address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=240)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=240)
        with pytest.raises(grpc.aio.AioRpcError):
            await answers.read()
        assert await answers.code() is CODES.UNAUTHENTICATED


async def test_tokens_change_with_their_file(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text(TOKEN)
    theirs.write_text(TOKEN)
    async with (
        running_server(SecurityConfig(service_token_file=str(theirs)).server) as address,
        connect(address, security=SecurityConfig(service_token_file=str(ours))) as channel,
    ):
        assert await call(channel) == "no certificate"
        theirs.write_text(f"{OTHER_TOKEN}\n")
        assert (await call(channel)).startswith("UNAUTHENTICATED")
        ours.write_text(f"{OTHER_TOKEN}\n")
        assert await call(channel) == "no certificate"


async def test_a_token_goes_with_a_certificate_too(certificates: Certificates) -> None:
    def with_token(name: str, token: str) -> SecurityConfig:
        return replace(certificates.config(name), service_token=token)

    async with running_server(with_token("scheduler", TOKEN).server) as address:
        assert await ask(address, with_token("frontend", TOKEN)) == "frontend"
        assert (await ask(address, with_token("frontend", OTHER_TOKEN))).startswith("UNAUTHENTICATED")


async def test_metadata_is_bounded() -> None:
    async with running_server(ServerSecurity()) as address, connect(address) as channel:
        assert await call(channel, metadata=(("note", "x" * (MAX_METADATA_BYTES // 2)),)) == "no certificate"
        assert (await call(channel, metadata=(("note", "x" * MAX_METADATA_BYTES),))).startswith("RESOURCE_EXHAUSTED")


async def test_a_client_that_pings_often_is_answered_and_kept() -> None:
    num_pings, num_answered = 20, 0
    async with running_server(ServerSecurity()) as address, asyncio.timeout(240):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(SETTINGS))
        for _ in range(num_pings):
            writer.write(http2_frame(PING, bytes(8)))
        while num_answered < num_pings:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            assert head[3] != GOAWAY
            num_answered += head[3] == PING and head[4] == 1
        writer.close()


def http2_frame(kind: int, payload: bytes = b"") -> bytes:
    """A frame of the connection itself: length, type, no flags, stream 0 (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind]) + bytes(5) + payload


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "scheduler.example.com"])
async def test_plaintext_is_refused_beyond_loopback(host: str) -> None:
    server = RpcServer(services=(), security=SecurityConfig(service_token=TOKEN).server)
    with pytest.raises(ConfigError, match=r"--tls-cert.*--insecure"):
        await server.start(host=host, port=0)
    with pytest.raises(ConfigError, match=r"--tls-cert.*--insecure"):
        connect(f"{host}:50052")
    await connect(f"{host or '[::1]'}:50052", security=SecurityConfig(insecure=True)).close()


async def test_programs_need_tls_for_a_scheduler_elsewhere() -> None:
    llm = AsyncLLM(address="10.0.0.1:50052")
    with pytest.raises(ConfigError, match=r"address is '10\.0\.0\.1:50052'.*--tls-cert.*--insecure"):
        await llm.start()


async def test_insecure_allows_plaintext_on_every_interface() -> None:
    server = RpcServer(services=(), security=SecurityConfig(insecure=True).server)
    assert await server.start(host="0.0.0.0", port=0) > 0
    await server.stop(grace_s=0)


def test_files_that_cannot_be_used_are_named(certificates: Certificates, tmp_path: Path) -> None:
    good = certificates.config("scheduler")
    with pytest.raises(ConfigError, match=r"no\.crt.*cannot be used"):
        RpcServer(services=(), security=replace(good, tls_cert=certificates.path("no.crt")).server)
    with pytest.raises(ConfigError, match=r"frontend\.key.*cannot be used"):
        connect("127.0.0.1:1", security=replace(good, tls_key=certificates.path("frontend.key")))
    (tmp_path / "nonsense").write_text("nonsense")
    (tmp_path / "short").write_text("fifteen-letters")
    with pytest.raises(ConfigError, match=r"tls_ca .*nonsense.*cannot be used"):
        connect("127.0.0.1:1", security=SecurityConfig(tls_ca=str(tmp_path / "nonsense")))
    with pytest.raises(ConfigError, match="token of 15 characters, must be at least 16"):
        connect("127.0.0.1:1", security=SecurityConfig(service_token_file=str(tmp_path / "short")))
    exact = SecurityConfig(service_token="sixteen-letters-")
    assert ClientCredentials(exact).metadata() == (("authorization", "Bearer sixteen-letters-"),)
