"""Batches and benchmarks without a server: lines of files, pauses, measures and their bounds."""

import argparse
import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda.bench.figures import report
from pagoda.bench.load import RequestResult
from pagoda.bench.requests import SampleRequest
from pagoda.cli import make_parser
from pagoda.commands import bench_serve, run_batch
from pagoda.http import batch
from pagoda.http.batch import BatchCounts, BatchLine, LineError, parse_line
from pagoda.http.http_client import AsyncHttpClient, error_message
from pagoda_common.errors import ConfigError, NotReady, PagodaError


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
        (b"{", "invalid_json_line", None, False, "the line is not JSON: "),
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
