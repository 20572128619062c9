"""Every field of the answers that generate nothing, which figures count a request, and that each end takes it back."""

import asyncio
import contextlib
import platform
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_common.errors import QueueFull
from pagoda_common.version import VERSION
from pagoda_frontend.http.operators import status_calls
from pagoda_frontend.observability import request_log
from pagoda_frontend.observability.request_log import LoggedCall
from tests.service.frontend.harness import MODEL, Running, running_frontend, until


def shown_headers(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in ("date", "content-length")}


async def test_answers_of_the_probes(frontend: Running) -> None:
    answers: list[tuple[str, Any]] = [
        ("/live", None),
        ("/health", None),
        ("/ping", None),
        ("/ready", {"status": "ready"}),
        ("/version", {"version": VERSION}),
        ("/load", {"server_load": 0}),
    ]
    for path, body in answers:
        response = await frontend.http.get(path)
        assert response.status_code == 200
        assert shown_headers(response) == ({} if body is None else {"content-type": "application/json"}), path
        assert (response.json() if body is not None else response.text or None) == body, path


async def test_cards_of_the_model(frontend: Running) -> None:
    model = frontend.server.serving.model
    permission = {
        "id": f"modelperm-{model.fingerprint}",
        "object": "model_permission",
        "created": model.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    cards = [
        {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "pagoda",
            "root": MODEL,
            "parent": None,
            "max_model_len": 512,
            "permission": [permission],
        }
        for name in (MODEL, "alias")
    ]
    assert (await frontend.http.get("/v1/models")).json() == {"object": "list", "data": cards}
    for card in cards:
        assert (await frontend.http.get(f"/v1/models/{card['id']}")).json() == card
    unknown = await frontend.http.get("/v1/models/other/one")
    fault = {
        "message": "The model `other/one` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert (unknown.status_code, unknown.json()) == (404, {"error": fault})


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (
            "/tokenize",
            {"prompt": "hello"},
            {"count": 3, "max_model_len": 512, "tokens": [260, 284, 82], "token_strs": None},
        ),
        (
            "/tokenize",
            {"prompt": "hello", "return_token_strs": True, "model": "alias"},
            {"count": 3, "max_model_len": 512, "tokens": [260, 284, 82], "token_strs": ["he", "ll", "o"]},
        ),
        ("/tokenize", {"prompt": ""}, {"count": 0, "max_model_len": 512, "tokens": [], "token_strs": None}),
        ("/detokenize", {"tokens": [1, 260, 284, 82, 2]}, {"prompt": "<|im_start|>hello<|im_end|>"}),
        ("/detokenize", {"tokens": []}, {"prompt": ""}),
    ],
)
async def test_tokens_and_texts(frontend: Running, path: str, body: Any, answer: Any) -> None:
    response = await frontend.post(path, body)
    assert (response.status_code, response.json()) == (200, answer)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/detokenize", {"tokens": [3071]}, 200, None),
        ("/detokenize", {"tokens": [3072]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/v1/embeddings", {"input": [[5]], "model": "other"}, 404, "model"),
    ],
)
async def test_what_is_refused_of_them(frontend: Running, path: str, body: Any, status: int, param: str | None) -> None:
    response = await frontend.post(path, body)
    assert response.status_code == status, response.text
    if status != 200:
        assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, status)


@pytest.mark.parametrize(("method", "path"), [("GET", "/nothing"), ("POST", "/ready"), ("GET", "/v1/messages")])
async def test_paths_and_methods_that_there_are_not(frontend: Running, method: str, path: str) -> None:
    response = await frontend.http.request(method, path)
    status, kind, text = (
        (404, "NotFoundError", "Not Found")
        if path == "/nothing"
        else (405, "MethodNotAllowedError", "Method Not Allowed")
    )
    message = f"{text}: {method} {path}"
    body: Any = {"error": {"message": message, "type": kind, "param": None, "code": status}, "detail": text}
    if path == "/v1/messages":
        body = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    assert (response.status_code, response.json()) == (status, body)


class Clock:
    """time, as the test says."""

    now_s = 100.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


async def test_facts_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_frontend(
        tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3", api_key=("k",)
    ) as running:
        serving = running.server.serving
        clock = Clock()
        clock.now_s = serving.started_s + 61.4
        monkeypatch.setattr(status_calls, "time", clock)
        facts = {
            "version": VERSION,
            "python": platform.python_version(),
            "uptime_s": 61,
            "tool_call_parser": "hermes",
            "reasoning_parser": "qwen3",
            "needs_key": True,
        }
        of_model = {"models": [MODEL, "alias"], "max_model_len": 512, "vocab_size": 3072, "has_chat_template": True}
        assert (await running.http.get("/status/facts")).json() == {**facts, **of_model}
        serving.is_draining = True
        assert (await running.http.get("/status/facts")).json() == facts


async def test_the_past_has_its_period_and_columns(frontend: Running) -> None:
    assert (await frontend.http.get("/status/history")).json() == {"period_s": 5.0, "columns": {}}
    frontend.fake.load.num_used_blocks, frontend.fake.load.num_waiting_reqs = 25, 3
    before = frontend.server._parts[0].moment()
    await frontend.complete(prompt=[5, 6, 7], max_tokens=5)
    now = frontend.server._parts[0].moment()
    frontend.server.serving.history.add(now, before, elapsed_s=2.0, unix_s=7.04)
    columns = (await frontend.http.get("/status/history")).json()["columns"]
    latencies = [f"{name}_token_p{share}" for name in ("first", "next") for share in (50, 95, 99)]
    assert list(columns) == ["time", "generated", "prompts", "running", "waiting", "kv", *latencies]
    values = {"time": [7.0], "generated": [2.5], "prompts": [1.5], "running": [0], "waiting": [3], "kv": [0.25]}
    assert {name: columns[name] for name in values} == values
    for name in latencies:
        assert columns[name][0] >= 0


async def test_a_call_of_the_log_is_whole(frontend: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(request_log, "time", clock)
    log = frontend.server.serving.request_log
    with log.follow("a", tenant="t", num_prompt_tokens=7, num_sequences=2) as call:
        running = {
            "id": "a",
            "state": "running",
            "started": 100.0,
            "duration_s": None,
            "first_token_s": None,
            "prompt_tokens": 7,
            "output_tokens": 0,
            "sequences": 2,
            "reason": "",
        }
        assert (await frontend.http.get("/status/requests")).json() == {"running": [running], "ended": []}
        clock.now_s += 0.12345
        call.add([], num_output_tokens=3)
        clock.now_s += 1.0
        call.add([], num_output_tokens=4)
        shown = {**running, "first_token_s": 0.1235, "output_tokens": 4}
        assert (await frontend.http.get("/status/requests")).json()["running"] == [shown]
    ended = {**shown, "state": "aborted", "duration_s": 1.123}
    assert (await frontend.http.get("/status/requests")).json() == {"running": [], "ended": [ended]}


async def load_of(running: Running) -> int:
    answer = (await running.http.get("/load")).json()
    assert list(answer) == ["server_load"]
    load: int = answer["server_load"]
    return load


def calls(running: Running) -> tuple[list[LoggedCall], list[LoggedCall]]:
    log = running.server.serving.request_log
    return log.running(), log.ended()


async def assert_idle(running: Running) -> None:
    """Nothing is left of calls that have ended."""
    serving = running.server.serving
    await until(lambda: serving.is_idle and running.fake.num_open_sequences == 0)
    assert await load_of(running) == 0
    assert (serving.num_open, serving.num_calls, serving.held_memory.num_bytes) == (0, 0, 0)
    assert serving._open == {}
    assert serving.request_log.running() == []


ASKED = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[5], [6]], "n": 2, "max_tokens": 300}),
        ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 300, "stream": True}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 300}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 300}),
        ("/v1/embeddings", {"input": [[5], [6]]}),
    ],
)
async def test_load_counts_requests_that_are_being_answered_whatever_they_are_made_of(
    frontend: Running, path: str, body: Any
) -> None:
    frontend.fake.is_paused = True
    frontend.fake.load.num_waiting_reqs = 7  # of the engine: another figure
    asked = [asyncio.create_task(frontend.post(path, body)) for _ in range(2)]
    await until(lambda: frontend.server.serving.num_open == 2)
    assert await load_of(frontend) == 2
    assert len(calls(frontend)[0]) == 2
    frontend.fake.is_paused = False
    for response in await asyncio.gather(*asked):
        assert response.status_code == 200
    await assert_idle(frontend)
    assert [call.state for call in calls(frontend)[1]] == ["finished"] * 2
    assert frontend.server.serving.num_requests == 2


async def test_load_counts_calls_over_grpc_and_no_probe(frontend: Running) -> None:
    frontend.fake.is_paused = True
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    call = stub.GenerateUnary(inference_pb2.GenerateRequest(text="hello", request_id="g"))
    await until(lambda: frontend.server.serving.num_open == 1)
    for _ in range(3):
        assert await load_of(frontend) == 1
    assert frontend.server.serving.is_open("g", tenant="")
    frontend.fake.is_paused = False
    await call
    await assert_idle(frontend)


async def test_load_counts_no_call_that_only_reads_or_whose_body_has_not_come(frontend: Running) -> None:
    is_sent = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": [5], "max_tokens": '
        await is_sent.wait()
        yield b"1}"

    asked = asyncio.create_task(
        frontend.http.post("/v1/completions", content=body(), headers={"Content-Type": "application/json"})
    )
    await until(lambda: frontend.server.serving.num_calls == 1)
    assert await load_of(frontend) == 0
    assert not frontend.server.serving.is_idle
    is_sent.set()
    assert (await asked).status_code == 200
    await assert_idle(frontend)


async def leave(running: Running) -> None:
    """A client goes away in the middle of its stream."""
    running.fake.step_s = 0.005
    body = {"prompt": [5], "max_tokens": 400, "stream": True}
    async with running.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())


async def be_refused(running: Running) -> None:
    running.fake.reject["*"] = QueueFull("max_num_queued_reqs is 1")
    assert (await running.post("/v1/completions", {"prompt": [5]})).status_code == 503


async def fail(running: Running) -> None:
    running.fake.fail_at = Everything(0)
    assert (await running.post("/v1/completions", {"prompt": [5]})).status_code == 500


class Everything(dict[str, int]):
    """Says the same of every request id, and has all of them."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self._value = value

    def __contains__(self, key: object) -> bool:
        return True

    def get(self, key: str, default: Any = None) -> Any:
        return self._value


async def be_wrong(running: Running) -> None:
    assert (await running.post("/v1/completions", {"prompt": [5], "n": 0})).status_code == 400


async def be_aborted(running: Running) -> None:
    running.fake.is_paused = True
    headers = {"X-Request-Id": "a"}
    asked = asyncio.create_task(running.post("/v1/completions", {"prompt": [5]}, headers=headers))
    await until(lambda: running.server.serving.is_open("cmpl-a", tenant=""))
    assert (await running.http.post("/status/requests/cmpl-a/abort")).json() == {"aborted": "cmpl-a"}
    response = await asked
    assert response.json()["choices"][0]["finish_reason"] == "abort"


async def be_cancelled(running: Running) -> None:
    """A client that waits for a whole answer goes away."""
    running.fake.is_paused = True
    asked = asyncio.create_task(running.post("/v1/chat/completions", {"messages": ASKED}))
    await until(lambda: running.fake.num_open_sequences == 1)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked


@pytest.mark.parametrize(
    ("end", "state", "counted"),
    [
        (leave, "aborted", {"abort": 1}),
        (be_refused, "failed", {"error": 1}),
        (fail, "failed", {"error": 1}),
        (be_wrong, None, {}),
        (be_aborted, "aborted", {"abort": 1}),
        (be_cancelled, "aborted", {"abort": 1}),
    ],
)
async def test_every_way_to_end_is_counted_once_and_leaves_nothing(
    frontend: Running, end: Any, state: str | None, counted: dict[str, int]
) -> None:
    await end(frontend)
    await assert_idle(frontend)
    assert [call.state for call in calls(frontend)[1]] == ([] if state is None else [state])
    assert frontend.server.serving.num_requests == (0 if state is None else 1)
    text = (await frontend.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
    success = dict.fromkeys(("stop", "length", "abort", "error"), 0.0) | counted
    labels = f'engine="0",finished_reason="{{}}",model_name="{MODEL}"'
    assert sorted(lines) == sorted(
        f"vllm:request_success_total{{{labels.format(reason)}}} {float(value)}" for reason, value in success.items()
    )
    rejected = dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), 0.0)
    rejected["max_num_queued_reqs"] = float(end is be_refused)
    for bound, value in rejected.items():
        assert f'vllm:admission_rejections_total{{model_name="{MODEL}",reason="{bound}"}} {value}' in text
