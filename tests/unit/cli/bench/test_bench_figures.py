"""A benchmark's figures, table and file in full; what it sends, and what it does with what comes back."""

import argparse
import asyncio
import itertools
import json
import math
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pagoda.bench import load
from pagoda.bench.engine import save_json
from pagoda.bench.figures import is_good, peak_concurrency, peak_tokens_per_s, report, table
from pagoda.bench.load import Load, RequestResult, send_all, send_one, send_times
from pagoda.bench.requests import SampleRequest
from pagoda.commands import bench_serve
from pagoda_common.errors import NotReady, PagodaError

FIRST = RequestResult(prompt_len=10, start_s=0.0, end_s=1.0, ttft_s=0.2, itl_s=[0.4, 0.4], text="a", output_len=3)
SECOND = RequestResult(prompt_len=20, start_s=0.5, end_s=0.9, ttft_s=0.4, itl_s=[], text="b", output_len=1)
FAILED = RequestResult(prompt_len=30, start_s=0.6, ttft_s=0.3, text="c", output_len=7, error="HTTP 500")
FIGURES = {
    "duration": 2.0,
    "completed": 2,
    "failed": 1,
    "total_input_tokens": 30,
    "total_output_tokens": 4,
    "request_throughput": 1.0,
    "request_goodput": 0.5,
    "output_throughput": 2.0,
    "total_token_throughput": 17.0,
    "max_output_tokens_per_s": 3.0,
    "max_concurrent_requests": 2,
    "input_lens": [10, 20, 30],
    "output_lens": [3, 1, 0],
    "start_times": [0.0, 0.5, 0.6],
    "ttfts": [0.2, 0.4, 0.3],
    "itls": [[0.4, 0.4], [], []],
    "generated_texts": ["a", "b", "c"],
    "errors": ["", "", "HTTP 500"],
    **{"mean_ttft_ms": 300, "median_ttft_ms": 300, "std_ttft_ms": 100, "p25_ttft_ms": 250, "p99.9_ttft_ms": 399.8},
    **{"mean_tpot_ms": 400, "median_tpot_ms": 400, "std_tpot_ms": 0, "p25_tpot_ms": 400, "p99.9_tpot_ms": 400},
    **{"mean_itl_ms": 400, "median_itl_ms": 400, "std_itl_ms": 0, "p25_itl_ms": 400, "p99.9_itl_ms": 400},
    **{"mean_e2el_ms": 700, "median_e2el_ms": 700, "std_e2el_ms": 300, "p25_e2el_ms": 550, "p99.9_e2el_ms": 999.4},
}
TABLE = """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             4
Request rate configured (RPS):           2.50
Benchmark duration (s):                  2.00
Total input tokens:                      30
Total generated tokens:                  4
Request throughput (req/s):              1.00
Request goodput (req/s):                 0.50
Output token throughput (tok/s):         2.00
Peak output token throughput (tok/s):    3.00
Peak concurrent requests:                2.00
Total token throughput (tok/s):          17.00
---------------Time to First Token----------------
Mean TTFT (ms):                          300.00
Median TTFT (ms):                        300.00
P25 TTFT (ms):                           250.00
P99.9 TTFT (ms):                         399.80
----------------End-to-end Latency----------------
Mean E2EL (ms):                          700.00
Median E2EL (ms):                        700.00
P25 E2EL (ms):                           550.00
P99.9 E2EL (ms):                         999.40
=================================================="""


def figures() -> dict[str, Any]:
    goodput_ms = {"ttft": 300, "e2el": 1000}
    return report([FIRST, SECOND, FAILED], duration_s=2.0, percentiles=[25, 99.9], goodput_ms=goodput_ms)


def test_every_figure_is_what_the_requests_make_of_it() -> None:
    found = figures()
    assert found.keys() == FIGURES.keys()
    for name, value in found.items():
        wanted = FIGURES[name]
        assert value == (pytest.approx(wanted) if isinstance(value, float) else wanted), name


def test_a_run_without_time_or_requests_divides_by_nothing() -> None:
    found = report([], duration_s=0.0, percentiles=[50])
    assert (found["duration"], found["request_throughput"], found["request_goodput"]) == (1e-9, 0.0, None)
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (0.0, 0)
    assert (found["std_ttft_ms"], found["median_e2el_ms"], found["p50_itl_ms"]) == (0.0, 0.0, 0.0)


def test_the_whole_table() -> None:
    shown = table(figures(), metrics=["e2el", "ttft"], percentiles=[25, 99.9], max_concurrency=4, request_rate=2.5)
    assert [line.rstrip() for line in shown.split("\n")] == TABLE.split("\n")
    assert len(shown.split("\n")[1]) == 41 + 10
    plain = report([FIRST], duration_s=2.0, percentiles=[99])
    short = table(plain, metrics=["itl"], percentiles=[99]).split("\n")
    assert len(short) == len(TABLE.split("\n")) - 3 - 6
    assert not any("goodput" in line or "concurrency" in line or "configured" in line for line in short)


def test_a_request_must_keep_every_bound() -> None:
    assert is_good(FIRST, {"ttft": 200, "tpot": 400, "e2el": 1000})
    assert not is_good(FIRST, {"ttft": 200, "tpot": 399, "e2el": 1000})
    assert is_good(SECOND, {"tpot": 0}), "one token has no time between tokens"
    assert is_good(FAILED, {})


def test_peaks_count_within_whole_seconds() -> None:
    late = RequestResult(prompt_len=1, start_s=0.5, end_s=2.5, ttft_s=0.75, itl_s=[0.5, 0.75], output_len=3)
    assert peak_tokens_per_s([late]) == 2.0  # at 1.25, 1.75 and 2.5
    assert peak_tokens_per_s([late, late]) == 4.0
    assert peak_concurrency([FIRST, SECOND, late]) == 3


def test_properties_of_a_result() -> None:
    assert (FIRST.latency_s, FIRST.tpot_s, FIRST.is_success) == (1.0, pytest.approx(0.4), True)
    assert (SECOND.tpot_s, FAILED.is_success) == (None, False)
    two = RequestResult(prompt_len=1, start_s=1.0, end_s=3.0, ttft_s=0.5, output_len=2)
    assert (two.latency_s, two.tpot_s) == (2.0, 1.5)


def test_the_whole_body_of_each_endpoint() -> None:
    request = SampleRequest(prompt="why?", prompt_len=2, output_len=9)
    common = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "top_k": 5}
    plain = Load(backend="vllm", model="m", parameters={"top_k": 5})
    assert (plain.path, plain.body(request)) == ("/v1/completions", {**common, "prompt": "why?", "max_tokens": 9})
    chat = Load(backend="openai-chat", model="m", parameters={"top_k": 5})
    messages = [{"role": "user", "content": "why?"}]
    assert chat.path == "/v1/chat/completions"
    assert chat.body(request) == {**common, "messages": messages, "max_completion_tokens": 9}
    forced = Load(backend="openai", model="m", parameters={"max_tokens": 1, "model": "other"}).body(request)
    assert (forced["max_tokens"], forced["model"]) == (1, "other")


def test_due_times_begin_after_the_first_gap_and_keep_the_rate() -> None:
    times = list(send_times(4, request_rate=2, burstiness=1.0, seed=3))
    assert times[0] > 0
    assert times[-1] == pytest.approx(2.0)
    assert times == sorted(times)
    assert times == list(send_times(4, request_rate=2, burstiness=1.0, seed=3))


class Server:
    """Gives each request its events; counts those under way."""

    base_url = "http://server"

    def __init__(self, *events: Any) -> None:
        self.events = events
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.num_open = self.most_open = 0

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        self.paths.append(path)
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for _ in range(20):  # all of the others begin meanwhile
                await asyncio.sleep(0)
            for event in self.events:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.num_open -= 1


def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(1)
    monkeypatch.setattr(load.time, "perf_counter", lambda: float(next(ticks)))


REQUEST = SampleRequest(prompt="x", prompt_len=4, output_len=5)
PLAIN = Load(backend="openai", model="m")


async def one(*events: Any) -> RequestResult:
    return await send_one(cast("Any", Server(*events)), REQUEST, PLAIN)


async def test_a_result_of_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch)
    result = await one(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning": "hm "}}]},
        {"choices": [{"delta": {"reasoning_content": "so "}}]},
        {"choices": [{"delta": {"content": "yes"}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
        {"choices": [{"delta": {}}]},
    )
    assert (result.text, result.output_len, result.prompt_len) == ("hm so yes", 4, 4)
    assert (result.start_s, result.ttft_s, result.itl_s, result.end_s) == (1.0, 2.0, [1.0, 1.0, 1.0], 6.0)
    assert result.is_success


async def test_usage_counts_more_than_events_and_none_leaves_what_was_known() -> None:
    text = {"choices": [{"text": "ab"}]}
    counted = await one(text, {"usage": {"completion_tokens": 3, "prompt_tokens": 8}})
    assert (counted.output_len, counted.prompt_len) == (3, 8)
    unknown = await one(text, text, {"usage": {"completion_tokens": None, "prompt_tokens": None}})
    assert (unknown.output_len, unknown.prompt_len) == (2, 4)
    assert (await one({"choices": [{"text": None}]})).text == ""


async def test_what_fails_has_its_reason_and_what_came_before() -> None:
    cut = await one({"choices": [{"text": "ab"}]}, PagodaError("cut"))
    assert (cut.error, cut.text, cut.output_len, cut.is_success) == ("cut", "ab", 1, False)
    empty = await one({"choices": []})
    assert (empty.error, empty.output_len) == ("the answer has no token", 0)
    refused = await one(PagodaError("refused"))
    assert (refused.error, refused.output_len, refused.end_s) == ("refused", 0, refused.start_s)


@pytest.mark.parametrize(("max_concurrency", "most"), [(None, 5), (2, 2), (1, 1)])
async def test_no_more_requests_are_under_way_than_allowed(max_concurrency: int | None, most: int) -> None:
    server, done = Server({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}), []
    requests = [SampleRequest(str(number), number, 5) for number in range(5)]
    wanted = Load(backend="openai", model="m", max_concurrency=max_concurrency, endpoint="/here")
    results, duration_s = await send_all(cast("Any", server), requests, wanted, seed=1, on_done=done.append)
    assert server.most_open == most
    assert [result.prompt_len for result in results] == list(range(5))
    assert [id(result) for result in sorted(done, key=lambda r: r.prompt_len)] == [id(result) for result in results]
    assert {body["prompt"] for body in server.bodies} == {"0", "1", "2", "3", "4"}
    assert set(server.paths) == {"/here"}
    assert duration_s > 0


async def test_requests_wait_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 10.0, []

    async def sleep(delay_s: float) -> None:
        nonlocal now
        if delay_s:
            slept.append(delay_s)
            now += delay_s

    monkeypatch.setattr(load.time, "perf_counter", lambda: now)
    monkeypatch.setattr(load.asyncio, "sleep", sleep)
    due = list(send_times(3, request_rate=2, burstiness=4.0, seed=7))
    wanted = Load(backend="openai", model="m", request_rate=2, burstiness=4.0)
    _, duration_s = await send_all(cast("Any", Server({"choices": [{"text": "a"}]})), [REQUEST] * 3, wanted, seed=7)
    assert slept == pytest.approx([due[0], due[1] - due[0], due[2] - due[1]])
    assert duration_s == pytest.approx(due[2])


def serve_args(**changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        **{"backend": "openai", "label": None, "model": "some/model", "tokenizer": "tok", "num_prompts": 3},
        **{"metadata": ["gpu=none", "note=a=b"], "request_rate": math.inf, "burstiness": 1.5},
        **{"max_concurrency": None, "save_detailed": False, "append_result": False},
        **{"result_filename": None, "result_dir": None, "served_model_name": None, "endpoint": None},
        **{"ignore_eos": False, "extra_body": None, **dict.fromkeys(bench_serve.SAMPLING)},
    }
    return argparse.Namespace(**values | changes)


def test_the_load_is_what_the_flags_say() -> None:
    assert bench_serve.make_load(serve_args()) == Load(
        backend="openai", model="some/model", burstiness=1.5, parameters={"temperature": 0.0}
    )
    sampling = {"temperature": 0.5, "top_p": 0.0, "top_k": 0, "min_p": 0.1, "frequency_penalty": 0.2}
    sampling |= {"presence_penalty": 0.3, "repetition_penalty": 0.4}
    flags = {"backend": "vllm", "served_model_name": "name", "endpoint": "/x", "request_rate": 3.0}
    more = {"max_concurrency": 7, "ignore_eos": True, "extra_body": {"top_k": 9, "user": "me"}}
    assert bench_serve.make_load(serve_args(**flags, **more, **sampling)) == Load(
        backend="vllm",
        model="name",
        endpoint="/x",
        request_rate=3.0,
        burstiness=1.5,
        max_concurrency=7,
        parameters=sampling | {"ignore_eos": True, "top_k": 9, "user": "me"},
    )


def saved(folder: Path, **changes: Any) -> tuple[str, dict[str, Any]]:
    bench_serve.save(serve_args(result_dir=str(folder / "deep" / "er"), **changes), FIGURES)
    [path] = (folder / "deep" / "er").iterdir()
    return path.name, json.loads(path.read_text())


def test_the_file_of_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve.time, "strftime", lambda pattern, *moment: f"<{pattern}>")
    name, result = saved(tmp_path)
    assert name == "openai-infqps-model-<%Y%m%d-%H%M%S>.json"
    described = {
        "date": "<%Y%m%d-%H%M%S>",
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": "some/model",
        "tokenizer_id": "tok",
        "num_prompts": 3,
        "gpu": "none",
        "note": "a=b",
        "request_rate": "inf",
        "burstiness": 1.5,
        "max_concurrency": None,
    }
    details = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
    assert result == described | {key: value for key, value in FIGURES.items() if key not in details}


def test_the_file_of_a_result_with_details_and_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve.time, "strftime", lambda pattern, *moment: "now")
    name, result = saved(tmp_path, label="mine", request_rate=2.5, max_concurrency=8, save_detailed=True, metadata=[])
    assert name == "mine-2.5qps-concurrency8-model-now.json"
    assert (result["label"], result["request_rate"], result["max_concurrency"]) == ("mine", 2.5, 8)
    assert {key: result[key] for key in FIGURES} == FIGURES


def test_results_are_appended_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "r.json"
    for appends, num_lines in ((False, 1), (True, 2), (True, 3), (False, 1)):
        flags = {"result_dir": str(path.parent), "result_filename": "r.json", "append_result": appends}
        bench_serve.save(serve_args(**flags), FIGURES)
        assert len(path.read_text().splitlines()) == num_lines
    with pytest.raises(PagodaError, match="cannot write the result: "):
        bench_serve.save(serve_args(result_dir=str(path)), FIGURES)


def test_figures_are_saved_where_there_is_a_path(tmp_path: Path) -> None:
    save_json(None, {"a": 1})
    save_json(str(tmp_path / "a.json"), {"a": 1})
    assert (tmp_path / "a.json").read_text() == '{\n    "a": 1\n}\n'
    with pytest.raises(PagodaError, match="cannot write the figures: "):
        save_json(str(tmp_path), {})


class Models:
    """Returns the given answers, one for each call."""

    base_url = "http://server"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.paths: list[str] = []

    async def get(self, path: str) -> Any:
        self.paths.append(path)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"data": answer}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock that only sleeping moves."""
    now = 100.0

    async def sleep(delay_s: float) -> None:
        nonlocal now
        now += delay_s

    monkeypatch.setattr(bench_serve.time, "monotonic", lambda: now)
    monkeypatch.setattr(bench_serve.asyncio, "sleep", sleep)
    return lambda: now


async def test_a_server_is_asked_every_half_second_until_it_serves(clock: Callable[[], float]) -> None:
    server = Models(NotReady("1"), NotReady("2"), [{"id": "m"}])
    assert await bench_serve.wait_for_models(cast("Any", server), timeout_s=1.5) == [{"id": "m"}]
    assert (clock(), server.paths) == (101.0, ["/v1/models"] * 3)


async def test_a_server_is_waited_for_no_longer_than_the_bound(clock: Callable[[], float]) -> None:
    server = Models(NotReady("1"), NotReady("2"), NotReady("3"), [{"id": "m"}])
    with pytest.raises(NotReady, match="3"):
        await bench_serve.wait_for_models(cast("Any", server), timeout_s=1.0)
    assert clock() == 101.0


async def test_a_server_without_models_or_with_another_fault_is_not_waited_for(clock: Callable[[], float]) -> None:
    with pytest.raises(PagodaError, match="http://server serves no model"):
        await bench_serve.wait_for_models(cast("Any", Models([])), timeout_s=9)
    with pytest.raises(PagodaError, match="key"):
        await bench_serve.wait_for_models(cast("Any", Models(PagodaError("key"))), timeout_s=9)
    assert clock() == 100.0
