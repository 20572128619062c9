"""Parts of the commands without a server: what serve announces and prints, batches, measures, early checks, options."""

import argparse
import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda.bench.figures import report
from pagoda.bench.load import RequestResult
from pagoda.bench.requests import SampleRequest
from pagoda.cli import COMMANDS, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, make_parser
from pagoda.commands import bench_serve, chat, demo, run_batch, serve
from pagoda.commands.arguments import CommandParser, _last_value
from pagoda.http import batch
from pagoda.http.batch import BatchCounts, BatchLine, LineError, parse_line
from pagoda.http.http_client import AsyncHttpClient, error_message
from pagoda.options.vllm_options import OPTIONS, REFUSED_FLAGS
from pagoda.server import early_checks, local_server
from pagoda.server.local_stack import LocalStack, _within_reach
from pagoda_common.config.engine_config import EngineConfig, ModelConfig
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ConfigError, ModelLoadError, NotReady, PagodaError
from pagoda_common.process.supervisor import BackOff, RestartPolicy, Service, Supervisor

ANNOUNCED = """
Pagoda serves pagoda-tiny; ready in 2.5 s.
  HTTP       http://127.0.0.1:8123/v1
  status     http://127.0.0.1:8123/
  gRPC       127.0.0.1:50123 (pagoda.v1.Inference)
  scheduler  127.0.0.1:50052
Try:
  curl -N http://127.0.0.1:8123/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "pagoda-tiny", "stream": true, "messages": \
[{"role": "user", "content": "Tell me a story about a dog."}]}'
Ctrl-C ends it.
"""
OTHER = """
Pagoda serves it'\\''s; ready in 0.0 s.
  HTTP       https://[::1]:8123/v1
  gRPC       ::1:50123 (pagoda.v1.Inference)
  scheduler  127.0.0.1:50052
Try:
  curl -N https://[::1]:8123/v1/completions -H 'Content-Type: application/json' \
-H "Authorization: Bearer YOUR_API_KEY" \\
    -d '{"model": "it'\\''s", "stream": true, "prompt": "Once upon a time", "max_tokens": 32}'
Ctrl-C ends it.
"""


def stack(model: str = "pagoda-tiny", **fields: Any) -> LocalStack:
    frontend = FrontendConfig(**{"port": 8123, "grpc_port": 50123, "model": model, **fields})
    return LocalStack(engine=EngineConfig(model=ModelConfig(model=model)), frontend=frontend)


def test_the_whole_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.announcement(stack(), seconds=2.5) == ANNOUNCED
    monkeypatch.delenv("PAGODA_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    security = {"ssl_certfile": "c", "api_key": ("k",)}
    other = stack("other", host="::1", served_model_name=("it's", "two"), disable_status_page=True, **security)
    shown = serve.announcement(other, seconds=0.04)
    assert shown == OTHER.replace("serves it'\\''s;", "serves it's;")


@pytest.mark.parametrize(
    ("service", "line", "shown"),
    [
        ("worker", "INFO 09:41:07.512 worker: ready", "worker    | INFO 09:41:07.512 ready"),
        ("worker-1-rank-0", "INFO 1 worker: a worker: b", "worker-1-rank-0 | INFO 1 a worker: b"),
        ("scheduler", "INFO 1 worker: a\x1b[2J", "scheduler | INFO 1 worker: a\\x1b[2J"),
    ],
)
def test_a_line_of_a_service_does_not_name_it_twice(
    capsys: pytest.CaptureFixture[str], service: str, line: str, shown: str
) -> None:
    serve.print_line(service, line)
    assert capsys.readouterr().err == shown + "\n"


def test_json_lines_stay_and_others_become_some(capsys: pytest.CaptureFixture[str]) -> None:
    serve.print_json_line("worker", '{"a": 1}')
    serve.print_json_line("worker", "plain ü")
    printed = capsys.readouterr().err.splitlines()
    assert printed == ['{"a": 1}', '{"service": "worker", "message": "plain ü"}']


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PAGODA_API_KEY": "one, two", "VLLM_API_KEY": "two"}, "$PAGODA_API_KEY"),
        ({"PAGODA_API_KEY": "two, one"}, "YOUR_API_KEY"),
        ({"PAGODA_API_KEY": "x", "VLLM_API_KEY": "one"}, "$VLLM_API_KEY"),
        ({}, "YOUR_API_KEY"),
    ],
)
def test_a_key_is_the_variable_whose_first_key_it_is(environment: dict[str, str], shown: str) -> None:
    assert serve.key_shown(FrontendConfig(api_key=("one",)), environment) == shown
    assert [serve.has_keys(one) for one in (FrontendConfig(), FrontendConfig(api_key=("k",)))] == [False, True]
    assert serve.has_keys(FrontendConfig(api_key_file="f"))


class Running:
    """Stands for a supervisor: ends with a code, or when it is stopped."""

    def __init__(self, code: int | None = None) -> None:
        self.code, self.stopped = code, asyncio.Event()

    async def run(self) -> int:
        if self.code is None:
            await self.stopped.wait()
            return 0
        return self.code

    def stop(self) -> None:
        self.stopped.set()


async def never(*_: Any, **__: Any) -> str:
    await asyncio.Event().wait()
    return ""


@pytest.mark.parametrize(
    ("code", "is_ready", "has_fault", "expected", "said"),
    [
        (2, False, False, 2, ""),
        (1, False, False, 1, ""),
        (None, False, True, 2, "cannot serve pagoda-tiny: no such file"),
        (None, True, False, 0, "Pagoda serves pagoda-tiny"),
    ],
)
async def test_serve_ends_with_the_code_of_what_happened(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    code: int | None,
    is_ready: bool,
    has_fault: bool,
    expected: int,
    said: str,
) -> None:
    running = Running(code)
    monkeypatch.setattr(serve, "Supervisor", lambda **_: running)

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    async def at_once(*_: Any, **__: Any) -> str:
        if is_ready:
            asyncio.get_running_loop().call_soon(running.stop)
        return "no such file"

    monkeypatch.setattr(serve, "stop_on_signals", nothing)
    monkeypatch.setattr(serve, "find_load_fault", at_once if has_fault else never)
    monkeypatch.setattr(LocalStack, "wait_until_ready", at_once if is_ready else never)
    with caplog.at_level(logging.ERROR):
        assert await serve.serve(stack()) == expected
    assert said in caplog.text + capsys.readouterr().out


def test_addresses_of_a_stack() -> None:
    assert [_within_reach(host) for host in ("0.0.0.0", "", "::", "1.2.3.4", "localhost")] == [
        *("127.0.0.1", "127.0.0.1", "127.0.0.1", "1.2.3.4", "localhost")
    ]
    own = stack(host="0.0.0.0", grpc_host="10.0.0.1", security=SecurityConfig(insecure=True))
    assert (own.host, own.grpc_address, own.url) == ("127.0.0.1", "10.0.0.1:50123", "http://127.0.0.1:8123")
    assert stack(host="1.2.3.4", security=SecurityConfig(insecure=True)).grpc_address == "1.2.3.4:50123"
    assert (stack().model_name, stack(served_model_name=("a", "b")).model_name) == ("pagoda-tiny", "a")
    private = stack(ssl_certfile="c", ssl_keyfile="k", ssl_ca_certs="a", api_key=("known",)).for_this_process()
    assert (private.frontend.ssl_certfile, private.frontend.ssl_keyfile, private.frontend.ssl_ca_certs) == (None,) * 3
    assert (len(private.frontend.api_key), private.frontend.grpc_host) == (1, "127.0.0.1")
    assert private.frontend.api_key != ("known",)
    assert len(private.frontend.api_key[0]) == 48


async def test_a_stack_tells_each_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str | None] = ["", "a", "a", "", "b", "a", None]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(LocalStack, "_not_ready_reason", lambda self: reasons.pop(0))
    monkeypatch.setattr("pagoda.server.local_stack.asyncio.sleep", sleep)
    told: list[str] = []
    await stack().wait_until_ready(told.append)
    assert (told, slept) == (["a", "b", "a"], [0.1] * 6)


def line(**fields: Any) -> bytes:
    given = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps(given | fields).encode()


@pytest.mark.parametrize(
    "url",
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/score"),
        *("/v1/rerank", "/rerank", "/v2/rerank", "/v2/embed", "/classify", "/pooling"),
    ],
)
def test_a_line_of_a_batch(url: str) -> None:
    assert parse_line(line(url=url, method=None)) == BatchLine("a", url, {"prompt": "x"})
    assert parse_line(line(body={"stream": False})).body == {"stream": False}


@pytest.mark.parametrize(
    ("given", "code", "custom_id", "is_request", "message"),
    [
        (b"{", "invalid_json_line", None, False, "the line is no JSON: "),
        (b"[]", "invalid_json_line", None, False, "the line must be a JSON object, got a list"),
        (line(custom_id=5), "invalid_request", None, False, "custom_id must be a string, got 5"),
        (line(method="GET"), "invalid_method", "a", True, "method must be POST, got 'GET'"),
        (line(method=5), "invalid_method", "a", False, "method must be POST, got 5"),
        (line(url="/x"), "invalid_url", "a", True, "url must be one of /v1/chat/completions, "),
        (line(url=None), "invalid_url", "a", False, "got None"),
        (line(body=[]), "invalid_request", "a", False, "body must be an object, got []"),
        (line(body={"stream": True}), "invalid_request", "a", True, "stream is true: a batch has no streams"),
    ],
)
def test_a_line_that_is_none(given: bytes, code: str, custom_id: str | None, is_request: bool, message: str) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(given)
    error = caught.value
    assert (error.code, error.custom_id, error.is_request) == (code, custom_id, is_request)
    assert message in error.message


class Server:
    """Gives its answers one after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        self.asked.append(url)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("pagoda.http.batch.asyncio.sleep", sleep)
    return slept


async def test_a_line_is_sent_six_times_with_pauses_that_double(pauses: list[float]) -> None:
    counts, full = BatchCounts(), (503, {"error": {"message": "full"}})
    server = Server(*[full] * 6)
    result = await batch._answer(1, line(), cast("Any", server), counts)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert (len(server.asked), result["custom_id"], result["error"]) == (6, "a", {"code": "503", "message": "full"})
    assert (result["response"]["status_code"], result["response"]["body"]) == full
    assert (counts.num_completed, counts.num_failed, counts.num_invalid, counts.custom_ids) == (0, 1, 0, {"a"})


async def test_a_server_that_is_away_is_an_error_of_the_line_and_no_fault_of_it(pauses: list[float]) -> None:
    counts = BatchCounts()
    result = await batch._answer(1, line(), cast("Any", Server(*[NotReady("away")] * 6)), counts)
    assert (result["error"], result["response"]) == ({"code": "connection_error", "message": "away"}, None)
    assert (len(pauses), counts.num_failed, counts.num_invalid) == (5, 1, 0)
    again = await batch._answer(1, line(custom_id="b"), cast("Any", Server(NotReady("x"), (200, {"ok": 1}))), counts)
    assert (again["error"], again["response"]["body"], counts.num_completed) == (None, {"ok": 1}, 1)
    assert again["id"].startswith("batch_req_")
    assert again["response"]["request_id"].startswith("req_")
    assert len(again["id"]) == len("batch_req_") + 24
    for status in (400, 500, 504):
        refused = await batch._answer(
            1, line(custom_id=str(status)), cast("Any", Server((status, {"error": "x"}))), counts
        )
        assert refused["error"] == {"code": str(status), "message": "x"}
    twice = await batch._answer(1, line(), cast("Any", Server()), counts)
    assert twice["error"] == {"code": "duplicate_custom_id", "message": "custom_id 'a' is in the batch already"}
    wrong = await batch._answer(1, b"{", cast("Any", Server()), counts)
    assert (wrong["custom_id"], counts.num_failed, counts.num_invalid) == (None, 6, 1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"error": {"message": "why"}}', "why"),
        ('{"error": "why"}', "why"),
        (b"\xffno json", "\ufffdno json"),
        ("", "no reason given"),
        ("x" * 1001, "x" * 1000),
        ('{"error": {}}', '{"error": {}}'),
    ],
)
def test_what_an_error_says(text: str | bytes, shown: str) -> None:
    assert error_message(text) == shown


def test_what_a_client_shows() -> None:
    client = AsyncHttpClient(base_url="http://h", api_key="k", headers={"X-A": "b"})
    assert client._headers == {"Content-Type": "application/json", "X-A": "b", "Authorization": "Bearer k"}
    assert AsyncHttpClient(base_url="http://h")._headers == {"Content-Type": "application/json"}


async def test_a_batch_file_is_answered_by_the_server_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[dict[str, Any]] = []

    class Client(Server):
        def __init__(self, **options: Any) -> None:
            super().__init__((200, {"a": "ü"}), (200, {"b": "\ud800"}))
            made.append(options)

        async def __aenter__(self) -> "Client":
            return self

        async def __aexit__(self, *_: object) -> None:
            made.append({"closed": True})

        async def get(self, path: str) -> None:
            made.append({"get": path})

    monkeypatch.setattr(run_batch, "AsyncHttpClient", Client)
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(line() + b"\n\n" + line(custom_id="b"))
    given = {"url": "http://h:1/v1/", "api_key": [], "disable_tqdm": True, "max_concurrency": 1}
    counts = await run_batch.answer_file(argparse.Namespace(**given), None, source, target)
    assert made == [
        {"base_url": "http://h:1", "api_key": "of-the-environment"},
        {"get": "/v1/models"},
        {"closed": True},
    ]
    assert counts.num_completed == 2
    first, second = target.read_text().splitlines()
    assert '"a": "ü"' in first
    assert json.loads(second)["response"]["body"] == {"b": "\ud800"}
    made.clear()
    args = argparse.Namespace(**given | {"api_key": ["k", "l"]})
    await run_batch.answer_file(args, None, source, target)
    assert made[0]["api_key"] == "k"


def measured(monkeypatch: pytest.MonkeyPatch, *, words: str = "", models: list[dict[str, Any]], first: str = "") -> Any:
    """`bench serve` against fakes: what it was asked to do."""
    asked = SimpleNamespace(client={}, tokenizer="", sent=[], lengths=None, seeds=[])

    class Client:
        base_url = "http://server"

        def __init__(self, **options: Any) -> None:
            asked.client = options

        async def __aenter__(self) -> "Client":
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def get(self, path: str) -> Any:
            return {"data": models}

    def load(name: str) -> str:
        asked.tokenizer = name
        return name

    def read(args: argparse.Namespace, tokenizer: str, *, num_prompts: int) -> list[SampleRequest]:
        asked.lengths = (args.random_input_len, num_prompts)
        return [SampleRequest(str(number), 1, 1) for number in range(num_prompts)]

    async def send_one(client: Any, request: SampleRequest, load: Any) -> RequestResult:
        asked.sent.append(("one", request.prompt, load.model))
        return RequestResult(prompt_len=1, error=first)

    async def send_all(client: Any, requests: Any, load: Any, *, seed: int, on_done: Any = None) -> Any:
        asked.sent.append(("all", [request.prompt for request in requests], load.model))
        asked.seeds.append(seed)
        return [RequestResult(prompt_len=1, output_len=2, end_s=1.0)] * len(requests), 2.0

    monkeypatch.setattr(bench_serve, "AsyncHttpClient", Client)
    monkeypatch.setattr(bench_serve, "Tokenizer", SimpleNamespace(load=load))
    monkeypatch.setattr(bench_serve, "read_dataset", read)
    monkeypatch.setattr(bench_serve, "send_one", send_one)
    monkeypatch.setattr(bench_serve, "send_all", send_all)
    args = make_parser().parse_args(["bench", "serve", "--disable-tqdm", "--num-prompts", "3", *words.split()])
    args.is_input_len_given = args.parser.is_given("random_input_len")
    asked.figures = asyncio.run(bench_serve.measure(args, [50.0], {}))
    return asked


CARD = {"id": "m", "root": "/checkpoint", "max_model_len": 500}


def test_a_server_is_measured_with_its_own_names_and_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    asked = measured(monkeypatch, models=[CARD, {"id": "other"}], words="--num-warmups 5 --seed 9")
    assert asked.client == {"base_url": "http://127.0.0.1:8000", "api_key": "of-the-environment", "headers": {}}
    assert asked.tokenizer == "/checkpoint"
    assert asked.lengths == (500 - 8 - 128, 3)
    assert asked.sent == [("one", "0", "m"), ("all", ["0", "1", "2", "0", "1"], "m"), ("all", ["0", "1", "2"], "m")]
    assert asked.seeds == [9, 9]
    assert (asked.figures["completed"], asked.figures["duration"], asked.figures["request_goodput"]) == (3, 2.0, None)


def test_a_server_is_measured_as_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--base-url http://h:1/v1/ --api-key k --header A=b=c B=d --model other --input-len 1000 --tokenizer tok"
    asked = measured(monkeypatch, models=[CARD, {"id": "other", "max_model_len": 50}], words=words)
    assert asked.client == {"base_url": "http://h:1", "api_key": "k", "headers": {"A": "b=c", "B": "d"}}
    assert (asked.tokenizer, asked.lengths) == ("tok", (1000, 3)), "a length that is given stays"
    assert [one[0] for one in asked.sent] == ["one", "all"]
    assert asked.sent[0][2] == "other"
    assert measured(monkeypatch, models=[{"id": "x"}], words="--host ::1 --port 9").client["base_url"] == "http://::1:9"
    with pytest.raises(PagodaError, match="the first request failed: broken"):
        measured(monkeypatch, models=[CARD], first="broken")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 0}, "num_prompts is 0, must be at least 1"),
        ({"num_warmups": -1}, "num_warmups is -1, must be at least 0"),
        ({"request_rate": 0.0}, "request_rate is 0.0, must be more than 0"),
        ({"burstiness": 0.0}, "burstiness is 0.0, must be more than 0"),
        ({"max_concurrency": 0}, "max_concurrency is 0, must be at least 1"),
        ({"metric_percentiles": "50,-1"}, r"metric_percentiles has '-1', must be in \[0, 100\]"),
        ({"metric_percentiles": "100.1"}, "metric_percentiles has '100.1'"),
        ({"metric_percentiles": "half"}, "metric_percentiles has 'half'"),
        ({"header": ["A=b", "C"]}, "header has 'C', must be NAME=VALUE"),
        ({"metadata": ["C"]}, "metadata has 'C', must be NAME=VALUE"),
    ],
)
def test_numbers_of_a_benchmark_have_bounds(changes: dict[str, Any], message: str) -> None:
    given = vars(make_parser().parse_args(["bench", "serve"]))
    with pytest.raises(ConfigError, match=message) as caught:
        bench_serve.check(argparse.Namespace(**given | changes))
    assert caught.value.field == next(iter(changes))
    least = {"num_prompts": 1, "num_warmups": 0, "max_concurrency": 1, "metric_percentiles": "0,100", "header": ["A="]}
    bench_serve.check(argparse.Namespace(**given | least))
    assert bench_serve._goodput(["ttft:200", "e2el:1.5"]) == {"ttft": 200.0, "e2el": 1.5}
    assert bench_serve._names(" ttft, ,itl", "f", ("ttft", "itl")) == ["ttft", "itl"]


def test_a_benchmark_fails_when_nothing_succeeded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for results, code, told in (
        ([RequestResult(prompt_len=1, output_len=1)], 0, ""),
        ([RequestResult(prompt_len=1, error="broken")], 1, "1 requests failed, the first one with: broken\n"),
    ):

        async def measure(*_: Any, results: list[RequestResult] = results) -> dict[str, Any]:
            return report(results, duration_s=1.0, percentiles=[50.0])

        monkeypatch.setattr(bench_serve, "measure", measure)
        args = make_parser().parse_args(["bench", "serve", "--metric-percentiles", "50", "--request-rate", "3"])
        assert bench_serve.run(args, args.parser) == code
        printed = capsys.readouterr()
        assert printed.err == told
        assert "P50 TTFT (ms):" in printed.out
        assert "Request rate configured (RPS):           3.00" in printed.out


def checked(config: dict[str, Any], ranks: int = 1, asked: int | None = None) -> str:
    try:
        early_checks._check_ranks(config, ranks)
        early_checks._check_context(config, asked)
    except ConfigError as error:
        return f"{error.field}: {error.message}"
    return ""


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        ({"num_attention_heads": 8}, 8, ""),
        ({"num_attention_heads": 8}, 3, "tensor_parallel_size is 3, must divide the model's 8 attention heads"),
        ({"num_key_value_heads": 4}, 2, ""),
        ({"num_key_value_heads": 4}, 8, ""),
        ({"num_key_value_heads": 4}, 6, "is 6, must divide the model's 4 KV heads, or be a multiple of them"),
        ({"num_key_value_heads": 0}, 6, ""),
        ({"intermediate_size": 9}, 3, ""),
        ({"intermediate_size": 10}, 3, "must divide the model's intermediate size, 10"),
        ({"intermediate_size": 10, "num_experts": 2}, 3, ""),
        ({"text_config": {"num_attention_heads": 8}, "num_attention_heads": 9}, 3, "model's 8 attention heads"),
        ({"num_attention_heads": "8"}, 3, ""),
    ],
)
def test_ranks_divide_a_model(config: dict[str, Any], ranks: int, message: str) -> None:
    found = checked(config, ranks)
    assert (message in found) if message else found == ""
    assert found.startswith("tensor_parallel_size: " if message else "")


@pytest.mark.parametrize(
    ("config", "asked", "is_refused"),
    [
        ({"max_position_embeddings": 10}, 10, False),
        ({"max_position_embeddings": 10}, 11, True),
        ({"max_position_embeddings": 10}, None, False),
        ({"max_position_embeddings": 10, "rope_scaling": {"factor": 2}}, 11, False),
        ({"max_position_embeddings": 10, "rope_parameters": {"a": {"factor": 2}}}, 11, False),
        ({"max_position_embeddings": 10, "rope_scaling": None, "rope_parameters": {"theta": 1}}, 11, True),
        ({"text_config": {"max_position_embeddings": 10}}, 11, True),
        ({}, 11, False),
    ],
)
def test_a_context_is_that_of_the_model(config: dict[str, Any], asked: int | None, is_refused: bool) -> None:
    found = checked(config, asked=asked)
    assert found == ("max_model_len: max_model_len is 11, the model was made for 10 tokens" if is_refused else "")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_of_vllm_takes_what_asks_for_nothing(option: Any) -> None:
    option.check(None)
    for value in option.neutral or ():
        option.check(value)
        if not isinstance(value, bool | dict):
            option.check(str(value))
    if option.neutral is None:
        option.check("anything")
        return
    with pytest.raises(ConfigError, match="is not supported: ") as caught:
        option.check("something else")
    assert caught.value.field == option.name
    assert option.reason
    assert option.flags[0] == "--" + option.name.replace("_", "-")


def test_one_is_not_true_and_zero_is_not_false() -> None:
    options = {option.name: option for option in OPTIONS}
    for name, value in (("pipeline_parallel_size", True), ("enable_eplb", 0), ("enable_eplb", True)):
        with pytest.raises(ConfigError):
            options[name].check(value)
    assert not {flag for option in OPTIONS for flag in option.flags} & REFUSED_FLAGS.keys()


def test_the_last_value_of_a_flag_counts() -> None:
    flag = "--config"
    assert _last_value(["--config", "a", "--config=b"], flag) == "b"
    assert _last_value(["--config=a", "--config", "b"], flag) == "b"
    assert _last_value(["--config", "a", "--", "--config", "b"], flag) == "a"
    assert (_last_value(["--config"], flag), _last_value([], flag), _last_value(["--configs=x"], flag)) == (None,) * 3


def test_what_was_given_is_known(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("random-output-len: 5\n")
    words = ["bench", "serve", "--config", str(path), "--input-len=3"]
    parser = make_parser().parse_args(words).parser
    assert isinstance(parser, CommandParser)
    given = [parser.is_given(name) for name in ("random_input_len", "random_output_len", "num_prompts")]
    assert given == [True, True, False]


def test_commands_and_codes() -> None:
    assert [command.name for command in COMMANDS] == [
        *("serve", "demo", "chat", "complete", "run-batch", "bench serve", "bench throughput", "bench latency"),
        *("top", "health", "collect-env", "completion"),
    ]
    assert (EXIT_INTERRUPTED, EXIT_BROKEN_PIPE) == (130, 141)


def test_a_demo_needs_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    class OpenAI:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

        def stream_chat(self, **options: Any) -> Iterator[str]:
            asked.append(options)
            yield from self.texts

        texts: Any = (" ", "Once")

    monkeypatch.setattr(demo, "OpenAIServer", OpenAI)
    assert demo._talk(stack(api_key=("k", "l")), "why?", 7)
    assert asked == [
        {"base_url": "http://127.0.0.1:8123/v1", "api_key": "k"},
        {"messages": [{"role": "user", "content": "why?"}], "model": "pagoda-tiny", "max_tokens": 7},
    ]
    assert capsys.readouterr().out == "> why?\n\n Once\n\n"
    OpenAI.texts = (" ", "\n")
    assert not demo._talk(stack(), "why?", 7)

    def failing() -> Iterator[str]:
        yield "Once"
        raise PagodaError("broken")

    OpenAI.texts = failing()
    assert not demo._talk(stack(), "why?", 7)
    assert "error: broken" in capsys.readouterr().err
    kept: deque[str] = deque(maxlen=2)
    demo._keeper(kept)("worker", "line")
    assert list(kept) == ["worker    | line"]


def test_parameters_of_a_talk_are_those_that_are_given() -> None:
    given = {"max_tokens": 0, "temperature": 0.0, "top_p": None, "seed": 5}
    assert chat._parameters(argparse.Namespace(**given)) == {"max_tokens": 0, "temperature": 0.0, "seed": 5}


def test_children_are_restarted_with_these_pauses() -> None:
    policy = RestartPolicy()
    assert (policy.first_delay_s, policy.max_delay_s, policy.healthy_after_s) == (0.1, 10.0, 5.0)
    assert (policy.silent_after_s, policy.stopped_after_s, policy.max_failures) == (6.0, 1.0, 10)
    service = Service(name="a", command=("true",))
    assert (service.stop_timeout_s, service.environment) == (10.0, {})
    assert len(Supervisor(services=[service, service], output=lambda *_: None).children) == 2


@pytest.mark.parametrize(("uptime_s", "num_failures"), [(4.9, 2), (5.0, 1)])
def test_five_seconds_of_life_forget_a_failure(uptime_s: float, num_failures: int) -> None:
    back_off = BackOff(RestartPolicy())
    back_off.next_delay_s(uptime_s=0)
    assert back_off.next_delay_s(uptime_s=uptime_s) == pytest.approx(0.1 * num_failures)
    assert back_off.num_failures == num_failures


async def test_a_stack_of_one_command_is_ended_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(*_: Any, **__: Any) -> str:
        return "no such file"

    def prepared(code: int | None, *, is_ready: bool, has_fault: bool) -> Running:
        running = Running(code)
        monkeypatch.setattr(local_server, "Supervisor", lambda **_: running)
        monkeypatch.setattr(local_server, "find_load_fault", at_once if has_fault else never)
        monkeypatch.setattr(LocalStack, "wait_until_ready", at_once if is_ready else never)
        return running

    running = prepared(None, is_ready=True, has_fault=False)
    async with local_server.running_stack(stack()) as url:
        assert (url, running.stopped.is_set()) == ("http://127.0.0.1:8123", False)
    assert running.stopped.is_set()
    for code, has_fault, message in (
        (None, True, "cannot serve pagoda-tiny: no such file"),
        (1, False, "cannot serve pagoda-tiny: its services do not keep running"),
    ):
        running = prepared(code, is_ready=False, has_fault=has_fault)
        with pytest.raises(ModelLoadError, match=message):
            async with local_server.running_stack(stack()):
                raise AssertionError("it is not ready")
        assert running.stopped.is_set()
