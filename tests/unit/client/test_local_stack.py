"""The services of one machine: order, ports, times to end, readiness, and where secrets are; and batches."""

import asyncio
import ssl
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from pagoda.http import batch
from pagoda.http.batch import BatchCounts, LineError, parse_line, run_batch
from pagoda.http.http_client import AsyncHttpClient
from pagoda.llm.prompts import read_prompts
from pagoda.server import local_stack
from pagoda.server.local_stack import LocalStack
from pagoda.server.service_token import with_token
from pagoda.server.worker_services import with_standby
from pagoda.v1 import types_pb2
from pagoda_common.config.engine_config import EngineConfig, ParallelConfig, SchedulerConfig
from pagoda_common.config.frontend_config import API_KEY_VARIABLE, FrontendConfig
from pagoda_common.config.security_config import TOKEN_VARIABLE, SecurityConfig
from pagoda_common.errors import ConfigError, NotReady, PagodaError
from pagoda_common.process.supervisor import Service, describe_exit
from pagoda_common.text.tokenizer import Tokenizer
from tests.harness.certificates import make_certificates


def stack(frontend: FrontendConfig | None = None, **ports: Any) -> LocalStack:
    given = frontend or FrontendConfig(port=0, grpc_port=0, drain_timeout_s=7.0)
    return LocalStack.plan(engine=EngineConfig(), frontend=given, **{"scheduler_port": 0, **ports})


def flags_of(service: Service) -> dict[str, str]:
    return dict(word.split("=", 1) for word in service.command if word.startswith("--") and "=" in word)


def test_services_end_in_the_order_in_which_requests_pass_them() -> None:
    services = stack().services()
    assert [service.name for service in services] == ["frontend", "scheduler", "worker"]
    assert [service.stop_timeout_s for service in services] == [12.0] * 3, "drain time and five seconds"
    frontend, scheduler, worker = map(flags_of, services)
    assert {frontend["--drain-timeout"], scheduler["--drain-timeout"], worker["--drain-timeout"]} == {"7.0"}
    assert scheduler["--host"] == worker["--host"] == "127.0.0.1"
    assert frontend["--scheduler"] == worker["--scheduler"] == f"127.0.0.1:{scheduler['--port']}"
    assert worker["--port"] == "0"
    assert not {"--metrics-port"} & {*scheduler, *worker}


def test_ports_of_metrics_are_those_that_were_asked_for() -> None:
    planned = stack(metrics_port=0, worker_metrics_port=0)
    _, scheduler, worker = map(flags_of, planned.services())
    assert (scheduler["--metrics-port"], worker["--metrics-port"]) == ("0", "0")


def test_keys_are_in_the_environment_and_in_no_command_line() -> None:
    frontend, *others = stack(FrontendConfig(port=0, grpc_port=0, api_key=("hush-1", "hush-2"))).services()
    assert frontend.environment[API_KEY_VARIABLE] == "hush-1\nhush-2"
    assert not any("hush" in word for service in (frontend, *others) for word in service.command)
    assert all(API_KEY_VARIABLE not in service.environment for service in (*others, *stack().services()))
    assert "hush" not in repr(frontend)


def test_each_stack_draws_a_token_that_its_services_get_by_the_environment_alone() -> None:
    first, second = stack(), stack()
    tokens = {service.environment[TOKEN_VARIABLE] for service in first.services()}
    assert len(tokens) == 1
    (token,) = tokens
    assert len(token) >= 32
    assert token not in repr(first)
    assert not any(token in word for service in first.services() for word in service.command)
    assert token != second.engine.security.service_token == second.frontend.security.service_token


@pytest.mark.parametrize(
    "security",
    [
        SecurityConfig(service_token="given-by-the-operator"),
        SecurityConfig(service_token_file="file"),
        SecurityConfig(tls_ca="ca", tls_cert="cert", tls_key="key"),
    ],
)
def test_no_token_is_drawn_where_one_is_given_or_certificates_are_shown(security: SecurityConfig) -> None:
    assert with_token(security) is security


@pytest.mark.parametrize("name", ["scheduler_port", "scheduler_metrics_port", "worker_metrics_port"])
def test_ports_take_their_bounds(name: str) -> None:
    field = {"scheduler_metrics_port": "metrics_port"}.get(name, name)
    for port in (-1, 65536):
        with pytest.raises(ConfigError, match=f"{name} is {port}, must be between 0 and 65535") as caught:
            stack(**{field: port})
        assert caught.value.field == name


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def can_listen(host: str, port: int) -> bool:
        asked.append((host, port))
        return port != 5

    monkeypatch.setattr(local_stack, "can_listen", can_listen)
    config = FrontendConfig(host="127.0.0.2", grpc_host="127.0.0.3", port=1, grpc_port=2)
    planned = stack(config, scheduler_port=3, metrics_port=4, worker_metrics_port=6)
    assert asked == [("127.0.0.2", 1), ("127.0.0.3", 2), ("127.0.0.1", 3), ("127.0.0.1", 4), ("127.0.0.1", 6)]
    assert (planned.frontend.port, planned.frontend.grpc_port) == (1, 2)
    assert planned.frontend.scheduler == "127.0.0.1:3"
    for name, ports in (
        ("scheduler_port", {"scheduler_port": 5}),
        ("scheduler_metrics_port", {"metrics_port": 5}),
        ("worker_metrics_port", {"worker_metrics_port": 5}),
    ):
        with pytest.raises(ConfigError, match=f"{name} is 5, must be free") as caught:
            stack(config, **ports)
        assert caught.value.field == name


def test_addresses_are_those_that_this_machine_reaches() -> None:
    planned = stack(FrontendConfig(host="0.0.0.0", port=0, grpc_port=0))
    assert planned.frontend.grpc_host == "127.0.0.1", "gRPC would be plaintext over a network"
    assert planned.url == f"http://127.0.0.1:{planned.frontend.port}"
    assert planned.grpc_address == f"127.0.0.1:{planned.frontend.grpc_port}"
    assert planned.model_name == "pagoda-tiny"
    secure = FrontendConfig(port=0, grpc_port=0, ssl_certfile="c", ssl_keyfile="k", served_model_name=("a", "b"))
    planned = stack(secure)
    assert planned.url.startswith("https://")
    assert planned.model_name == "a"
    private = planned.for_this_process()
    assert private.url.startswith("http://")
    assert private.frontend.grpc_host == "127.0.0.1"
    (key,) = private.frontend.api_key
    assert len(key) == 48
    assert planned.for_this_process().frontend.api_key != (key,)


async def test_readiness_is_asked_until_it_is_there_and_each_reason_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["", "loading", "loading", "", "warming", None, "never asked"])
    planned = stack()
    monkeypatch.setattr(LocalStack, "_not_ready_reason", lambda _: next(answers))
    monkeypatch.setattr(local_stack, "READY_POLL_S", 0.0)
    told: list[str] = []
    await asyncio.wait_for(planned.wait_until_ready(told.append), 240)
    assert told == ["loading", "warming"]
    assert next(answers) == "never asked"


class Ready(BaseHTTPRequestHandler):
    """Answers as /ready does."""

    answers: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def do_GET(self) -> None:
        status, body = self.answers[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def answering(context: ssl.SSLContext | None) -> Generator[int]:
    """Serve `Ready`; gives the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("is_https", [False, True])
def test_our_own_frontend_is_asked_whatever_its_certificate_says(tmp_path: Path, is_https: bool) -> None:
    """The certificate is of an unknown authority, and names another host."""
    context, config = None, FrontendConfig(port=0, grpc_port=0)
    if is_https:
        certificates = make_certificates(tmp_path, "elsewhere.example")
        cert, key = (certificates.path(f"elsewhere.example.{ending}") for ending in ("crt", "key"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        config = replace(config, ssl_certfile=cert, ssl_keyfile=key)
    planned = stack(config)
    with answering(context) as port:
        planned = replace(planned, frontend=replace(planned.frontend, port=port))
        Ready.answers["/ready"] = (503, b'{"error": {"message": "loading"}}')
        assert planned._not_ready_reason() == "loading"
        Ready.answers["/ready"] = (503, b"<html>")
        assert planned._not_ready_reason() == "", "someone else's answer"
        Ready.answers["/ready"] = (200, b"{}")
        assert planned._not_ready_reason() is None
    assert planned._not_ready_reason() == "", "no one answers"


def test_standby_groups_do_not_serve_unless_somebody_says_how_many_do() -> None:
    plain = EngineConfig(parallel=ParallelConfig(data_parallel_size=2))
    assert with_standby(plain) is plain
    standing_by = replace(plain, parallel=ParallelConfig(data_parallel_size=2, standby_workers=1))
    assert with_standby(standing_by).scheduler.max_serving_groups == 2
    told = replace(standing_by, scheduler=SchedulerConfig(max_serving_groups=3))
    assert with_standby(told) is told


def test_an_end_without_a_fault_is_no_signal() -> None:
    assert describe_exit(0) == "ended with exit code 0"


def test_a_prompt_without_a_salt_has_an_empty_one() -> None:
    options: dict[str, Any] = {
        "tokenizer": Tokenizer.load("pagoda-tiny"),
        "model_info": types_pb2.ModelInfo(vocab_size=3072, max_model_len=10),
    }
    none: Any = {"prompt": "a", "cache_salt": None}
    assert [one.cache_salt for one in read_prompts([none, {"prompt": "a"}], **options)] == ["", ""]


class FakeHttp:
    """Returns the given answers; raises those that are NotReady."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append((path, body))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return cast("tuple[int, Any]", answer)


LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}'
FULL = (503, {"error": {"message": "full"}})


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(batch.asyncio, "sleep", sleep)
    return made


async def run(http: FakeHttp, *lines: bytes) -> tuple[list[dict[str, Any]], BatchCounts]:
    counts = BatchCounts()
    found = [one async for one in run_batch(lines, cast("Any", http), max_concurrency=1, counts=counts)]
    return found, counts


async def test_a_full_or_absent_server_is_asked_six_times_with_growing_pauses(pauses: list[float]) -> None:
    http = FakeHttp([FULL, NotReady("away"), FULL, FULL, FULL, (200, {"ok": 1})])
    (result,), counts = await run(http, LINE)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert http.asked == [("/v1/completions", {"prompt": "x"})] * 6
    assert (result["response"]["status_code"], result["error"]) == (200, None)
    assert (counts.num_completed, counts.num_failed) == (1, 0)


async def test_a_server_that_stays_away_or_full_is_an_error_of_the_line(pauses: list[float]) -> None:
    (result,), counts = await run(FakeHttp([FULL] * 6), LINE)
    assert (result["response"]["status_code"], result["error"]["code"]) == (503, "503")
    assert (counts.num_completed, counts.num_failed) == (0, 1)
    (result,), counts = await run(FakeHttp([NotReady("away")] * 6), LINE)
    assert (result["response"], result["error"]) == (None, {"code": "connection_error", "message": "away"})
    assert counts.num_failed == 1
    assert len(pauses) == 10


class CountingHttp:
    """Counts the requests under way."""

    def __init__(self) -> None:
        self.num_running = 0
        self.most_running = 0

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(20):
            await asyncio.sleep(0)
        self.num_running -= 1
        return 200, {}


@pytest.mark.parametrize("max_concurrency", [1, 3, 8])
async def test_as_many_requests_are_under_way_as_may_be_and_no_more(max_concurrency: int) -> None:
    http, counts = CountingHttp(), BatchCounts()
    lines = [LINE.replace(b'"a"', b'"%d"' % number) for number in range(12)]
    results = run_batch(lines, cast("Any", http), max_concurrency=max_concurrency, counts=counts)
    assert [result["custom_id"] async for result in results] == [str(number) for number in range(12)]
    assert (http.most_running, counts.num_completed) == (max_concurrency, 12)


async def test_other_failures_are_not_tried_again_and_names_are_taken_once(pauses: list[float]) -> None:
    results, counts = await run(FakeHttp([(400, {"error": {"message": "wrong"}})]), LINE, b"  \n", LINE)
    assert [result["error"]["code"] for result in results] == ["400", "duplicate_custom_id"]
    assert (counts.num_completed, counts.num_failed, counts.custom_ids) == (0, 2, {"a"})
    assert pauses == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b'{"url": "/v1/completions", "body": {}}', "invalid_request"),
        (b'{"custom_id": 5, "url": "/v1/completions", "body": {}}', "invalid_request"),
        (b'{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "invalid_method"),
        (b'{"custom_id": "a", "url": "/v1/images/generations", "body": {}}', "invalid_url"),
        (b'{"custom_id": "a", "url": "/v2/x", "body": {}}', "invalid_url"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": []}', "invalid_request"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "invalid_request"),
    ],
)
def test_other_lines_are_refused_with_a_code(text: bytes, code: str) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(text)
    assert caught.value.code == code
    assert caught.value.custom_id == ("a" if b'"a"' in text else None)
    assert parse_line(b'{"custom_id": "b", "url": "/v1/embeddings", "body": {"stream": false}}').custom_id == "b"


@pytest.mark.parametrize(
    ("line", "num_invalid"),
    [
        (b"{", 1),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": []}', 1),
        (b'{"custom_id": "a", "url": "/v2/x", "body": {}}', 0),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', 0),
    ],
)
async def test_lines_that_are_no_request_are_counted_apart(line: bytes, num_invalid: int) -> None:
    _, counts = await run(FakeHttp([]), line)
    assert (counts.num_failed, counts.num_invalid) == (1, num_invalid)


def stream_of(*chunks: bytes) -> AsyncHttpClient:
    """A client whose server sends `chunks`."""

    async def iter_any() -> AsyncGenerator[bytes]:
        for chunk in chunks:
            yield chunk

    @asynccontextmanager
    async def request(*_: Any) -> AsyncGenerator[Any]:
        yield SimpleNamespace(status=200, content=SimpleNamespace(iter_any=iter_any))

    client = AsyncHttpClient(base_url="http://a")
    client._request = request  # type: ignore[method-assign]  # no server
    return client


@pytest.mark.parametrize("size", [1, 3, 7, 100])
async def test_events_are_read_however_they_are_cut(size: int) -> None:
    sent = b': hi\r\n\r\ndata: {"a": 1}\n\ndata:{"b": 2}\n\ndata: [DONE]'
    client = stream_of(*(sent[start : start + size] for start in range(0, len(sent), size)))
    assert [event async for event in client.stream("/p", {})] == [{"a": 1}, {"b": 2}]


async def test_a_stream_that_ends_without_its_last_event_is_an_error() -> None:
    stream = stream_of(b'data: {"a": 1}\n\n').stream("/p", {})
    assert await anext(stream) == {"a": 1}
    with pytest.raises(PagodaError, match="ended the stream too early"):
        await anext(stream)


@pytest.mark.parametrize(
    ("reason", "listens", "expected"),
    [("loading", True, "loading"), ("", True, ""), (None, True, None), (None, False, "")],
)
async def test_a_frontend_that_wants_certificates_has_to_listen_alone(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, listens: bool, expected: str | None
) -> None:
    planned = stack()
    frontend = SimpleNamespace(ssl_ca_certs="ca", scheduler="127.0.0.1:1", port=planned.frontend.port, host="127.0.0.1")
    asked: list[Any] = []

    async def not_ready_reason(scheduler: str, *, security: Any) -> str | None:
        asked.append((scheduler, security))
        return reason

    monkeypatch.setattr(local_stack, "not_ready_reason", not_ready_reason)
    given = SimpleNamespace(frontend=frontend, engine=planned.engine, host="127.0.0.1")
    if listens:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
            frontend.port = server.sockets[0].getsockname()[1]
            assert await LocalStack._look(cast("Any", given)) == expected
    else:
        assert await LocalStack._look(cast("Any", given)) == expected
    assert asked == [("127.0.0.1:1", planned.engine.security)]


async def test_a_batch_that_is_given_up_ends_its_requests() -> None:
    ended: list[str] = []

    class Http:
        async def post(self, path: str, body: Any) -> tuple[int, Any]:
            try:
                if body["prompt"] != "a":
                    await asyncio.Event().wait()
                return 200, {}
            finally:
                ended.append(body["prompt"])

    lines = [
        b'{"custom_id": "%b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "%b"}}' % (name, name)
        for name in (b"a", b"b", b"c")
    ]
    results = run_batch(lines, cast("Any", Http()), max_concurrency=2, counts=BatchCounts())
    first = await anext(results)
    assert first["custom_id"] == "a"
    await asyncio.sleep(0)
    await results.aclose()
    assert ended[0] == "a"
    assert "b" in ended
    assert asyncio.all_tasks() == {asyncio.current_task()}
