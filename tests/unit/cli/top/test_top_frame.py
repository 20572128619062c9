"""pagoda top: whole frames, each figure of which is another number."""

import argparse
import io
import json
import urllib.error
from email.message import Message
from typing import Any

import pytest

from pagoda.top import source as sources
from pagoda.top.frame import draw, speeds
from pagoda.top.sample import Sample, growth, quantile, rate
from pagoda.top.source import FrontendSource, SchedulerSource
from pagoda.top.text import Paint, bar, chart, count, curve, percent, seconds
from pagoda.v1 import types_pb2
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ConfigError, NotReady

PLAIN = Paint(is_on=False)
STAGES = ("schedule", "encode", "wire", "queue", "prepare", "forward", "sample", "decode", "deliver")


def samples_of(lines: list[str], *, at_s: float) -> Sample:
    return Sample.parse("\n".join(lines) + "\n", at_s=at_s)


def frontend_lines(n: int) -> list[str]:
    """After `n` rounds: of 100 tokens, 300 prompt tokens, 20 steps and so on."""
    lines = [
        'vllm:num_requests_running{model_name="a-model"} 12',
        'vllm:num_requests_waiting{model_name="a-model"} 3',
        'vllm:kv_cache_usage_perc{model_name="a-model"} 0.625',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1',
        f"pagoda:sampled_tokens_total {100 * n * n}",
        f"vllm:prompt_tokens_total {300 * n}",
        f"pagoda:engine_steps_total {20 * n}",
        "vllm:prefix_cache_queries_total 200",
        "vllm:prefix_cache_hits_total 150",
        "vllm:num_preemptions_total 4",
        "pagoda:worker_losses_total 2",
        "pagoda:scheduler_losses_total 1",
        'pagoda:group_info{group="0",state="serving",device="cpu"} 1',
        'pagoda:group_info{group="1",state="lost",device="a device with a name that is far too long for it"} 1',
        'pagoda:group_info{group="2",state="standby",device="gpu"} 1',
        'pagoda:group_requests_running{group="0"} 7',
        'pagoda:group_requests_running{group="1"} 5',
        'pagoda:group_requests_waiting{group="0"} 1',
        'pagoda:group_requests_waiting{group="1"} 2',
        'pagoda:group_kv_cache_usage_perc{group="0"} 0.5',
        'pagoda:group_kv_cache_usage_perc{group="1"} 0.05',
    ]
    for name, low in (("time_to_first_token", 0.1), ("inter_token_latency", 0.01)):
        for bound, share in ((low, 1), (low * 2, 3), ("+Inf", 4)):
            lines.append(f'vllm:{name}_seconds_bucket{{le="{bound}"}} {share * n}')
    for place, stage in enumerate(STAGES, start=1):
        lines.append(f'pagoda:step_seconds_count{{stage="{stage}"}} {20 * n}')
        lines.append(f'pagoda:step_seconds_sum{{stage="{stage}"}} {0.002 * place * 20 * n}')
    return lines


def scrape(n: int, *, at_s: float) -> Sample:
    return samples_of(frontend_lines(n), at_s=at_s)


def frame(*, width: int = 80, height: int = 0) -> list[str]:
    samples = [scrape(n, at_s=2.0 * n) for n in range(1, 4)]
    return draw(samples, name="http://here:8000", reason="", width=width, paint=PLAIN, height=height)


def scheduler_scrape(n: int, *, at_s: float) -> Sample:
    lines = [f"vllm:iteration_tokens_total_sum {1000 * n}", f"pagoda:sampled_tokens_total {400 * n}"]
    return samples_of([*lines, "vllm:num_requests_running 1"], at_s=at_s)


def test_several_models_are_named_and_the_fullest_cache_is_shown() -> None:
    lines = []
    for model, usage in (("one", 0.25), ("two", 0.5)):
        labels = f'model_name="{model}"'
        lines += [f"vllm:num_requests_running{{{labels}}} 2", f"vllm:kv_cache_usage_perc{{{labels}}} {usage}"]
        lines.append(f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="4",{labels}}} 1')
    shown = draw([samples_of(lines, at_s=1.0)], name="", reason="", width=80, paint=PLAIN, height=0)
    assert shown[0].rstrip() == "pagoda top  one, two"
    assert shown[2].startswith("running 4 ")
    assert shown[2].rstrip().endswith("50 %"), "the sizes of two caches are no one's"


@pytest.mark.parametrize("width", [60, 80])
def test_groups_of_several_models_are_rows_of_their_own(width: int) -> None:
    lines = []
    for model, num in (("one", 3), ("a-model-with-a-long-name", 4)):
        own = f'model_name="{model}",group="0"'
        lines.append(f'pagoda:group_info{{{own},state="serving",device="cpu"}} 1')
        lines.append(f"pagoda:group_requests_running{{{own}}} {num}")
        lines.append(f"pagoda:group_requests_waiting{{{own}}} {num + 10}")
        lines.append(f"pagoda:group_kv_cache_usage_perc{{{own}}} {num / 10}")
    shown = draw([samples_of(lines, at_s=1.0)], name="", reason="", width=width, paint=PLAIN, height=0)
    rows = [line.split() for line in shown if "serving" in line]
    assert [row[1:] for row in rows] == [
        ["0", "serving", "cpu", "3", "13", "30", "%"],
        ["0", "serving", "cpu", "4", "14", "40", "%"],
    ]
    assert rows[0][0] == "one"
    assert "a-model-with-a-long-name".startswith(rows[1][0])
    assert max(map(len, shown)) <= width


FRAME = """\
pagoda top  a-model                                             http://here:8000
────────────────────────────────────────────────────────────────────────────────
running 12          waiting 3           KV ████████▊░░░░░   62 % of 6,400 tokens
tokens/s 250        prompt tok/s 150                                          ▅█
first token 150 ms p95 200 ms     between tokens 15 ms p95 20 ms
prefix hits 75 %  preempted 4  steps/s 10  recoveries 2 worker, 1 scheduler

group state       device                               running  waiting       KV
0     serving     cpu                                        7        1     50 %
1     lost        a device with a name that is far t         5        2    5.0 %
2     standby     gpu                                        –        –        –

step          90 ms
schedule     2.0 ms  █▎
encode       4.0 ms   ██▋
wire         6.0 ms     ███▉
queue        8.0 ms         █████▎
prepare       10 ms               ██████▌
forward       12 ms                     ███████▉
sample        14 ms                             █████████▏
decode        16 ms                                      ██████████▌
deliver       18 ms                                                 ███████████▊"""
NARROW = """\
pagoda top  a-model                         http://here:8000
────────────────────────────────────────────────────────────
running 12          waiting 3           KV ██████▎░░░   62 %
tokens/s 250        prompt tok/s 150                      ▅█
first token 150 ms p95 200 ms
between tokens 15 ms p95 20 ms
prefix hits 75 %  preempted 4  steps/s 10
recoveries 2 worker, 1 scheduler

group state       device           running  waiting       KV
0     serving     cpu                    7        1     50 %
1     lost        a device with          5        2    5.0 %
2     standby     gpu                    –        –        –

step          90 ms
schedule     2.0 ms  ▉"""
SCHEDULER = """\
pagoda top                                                                   s:1
────────────────────────────────────────────────────────────────────────────────
running 1           waiting –           KV ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░      –
tokens/s 200        prompt tok/s 300                                           █
prefix hits –  preempted –  steps/s –  recoveries 0 worker

group state       device                               running  waiting       KV
no worker has registered

step      none since the last frame"""


def test_the_whole_frame_of_a_frontend() -> None:
    assert "\n".join(frame()) == FRAME


def test_a_narrow_terminal_has_what_does_not_fit_on_a_line_of_its_own() -> None:
    assert "\n".join(frame(width=60)[:16]) == NARROW
    assert frame(width=59) == frame(width=60) == frame(width=1)
    assert frame(width=121) == frame(width=120)
    assert len(frame(width=120)[1]) == 120
    assert max(map(len, frame(width=60))) == 60


def test_the_whole_frame_of_a_scheduler() -> None:
    samples = [scheduler_scrape(0, at_s=1.0), scheduler_scrape(1, at_s=3.0)]
    lines = draw(samples, name="s:1", reason="", width=80, paint=PLAIN)
    assert [line.rstrip() for line in lines] == SCHEDULER.split("\n")


def test_one_sample_has_no_speeds() -> None:
    lines = draw([scrape(1, at_s=1)], name="x", reason="", width=80, paint=PLAIN)
    assert lines[3].startswith("tokens/s –          prompt tok/s –")
    assert "steps/s –" in lines[5]
    assert lines[-1] == "step      none since the last frame"


def test_a_reason_stands_below_the_line_and_is_cut() -> None:
    lines = draw([], name="x", reason="r" * 100, width=80, paint=PLAIN)
    assert lines == ["pagoda top" + " " * 69 + "x", "─" * 80, "r" * 80]
    assert len(draw([], name="x", reason="", width=80, paint=PLAIN)) == 2
    assert draw([scrape(1, at_s=1)], name="x", reason="why", width=80, paint=PLAIN)[2] == "why"


def test_a_long_name_gives_way_to_the_model() -> None:
    [title, _] = draw([], name="n" * 100, reason="", width=60, paint=PLAIN)
    assert title == "pagoda top    " + "n" * 46


@pytest.mark.parametrize(("height", "num_rows"), [(0, 0), (28, 0), (29, 5), (30, 6), (40, 16), (41, 16), (99, 16)])
def test_the_chart_takes_the_rows_that_are_left(height: int, num_rows: int) -> None:
    lines = frame(height=height)
    assert "\n".join(lines[:22]) == FRAME
    if not num_rows:
        assert len(lines) == 22
        return
    assert lines[22:24] == ["", "tokens a second, at most 250"]
    assert len(lines[24:]) == num_rows - 1, "the title is a row, too"
    assert (lines[24][-3:], lines[-1][-3:]) == ("  █", " ██")


def test_colours_say_what_a_state_is() -> None:
    paint = Paint(is_on=True)
    text = "\n".join(draw([scrape(n, at_s=n) for n in (1, 2)], name="name", reason="why", width=80, paint=paint))
    for part in (
        "\x1b[1mpagoda top  a-model\x1b[0m",
        "\x1b[2mname\x1b[0m",
        "\x1b[31mwhy\x1b[0m",
        "\x1b[32mserving     \x1b[0m",
        "\x1b[31mlost        \x1b[0m",
        "\x1b[2mstandby     \x1b[0m",
        "\x1b[33m████████▊\x1b[0m\x1b[2m░░░░░\x1b[0m",
        "\x1b[2mrunning\x1b[0m \x1b[1m12\x1b[0m",
        "\x1b[2mforward   \x1b[0m",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert paint.bold("") == ""


def test_a_frontends_own_counter_stands_in_for_the_engines() -> None:
    def counted(value: float, at_s: float, name: str) -> Sample:
        return samples_of([f"{name} {value}"], at_s=at_s)

    own, engine = "vllm:generation_tokens_total", "pagoda:sampled_tokens_total"
    assert speeds([counted(1, 1, own), counted(5, 3, own), counted(5, 4, own)]) == [2.0, 0.0]
    assert speeds([counted(10, 1, engine), counted(30, 2, engine)]) == [20.0]
    assert speeds([Sample(1, {}), Sample(2, {})]) == [0.0]


def test_latencies_begin_with_the_first_sample_of_the_last_minute() -> None:
    """Slow answers until 40 s, fast ones since."""

    def told(slow: int, fast: int, at_s: float) -> Sample:
        name = "vllm:time_to_first_token_seconds_bucket"
        bounds = (("0.1", fast), ("1", fast + slow), ("+Inf", fast + slow))
        return samples_of([f'{name}{{le="{bound}"}} {value}' for bound, value in bounds], at_s=at_s)

    at_the_bound = [told(0, 0, 0), told(100, 0, 40), told(100, 10, 100)]
    assert "first token 50 ms" in "\n".join(draw(at_the_bound, name="", reason="", width=80, paint=PLAIN))
    before_it = [told(0, 0, 0), told(100, 0, 39), told(100, 10, 100)]
    assert "first token –" in "\n".join(draw(before_it, name="", reason="", width=80, paint=PLAIN))


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((10, 30, 40), 0.125, 0.05),
        ((10, 30, 40), 0.25, 0.1),
        ((10, 30, 40), 0.5, 0.15),
        ((10, 30, 40), 0.75, 0.2),
        ((10, 30, 40), 1.0, 0.2),
        ((0, 0, 4), 0.5, 0.2),
        ((0, 4, 4), 0.25, 0.125),
    ],
)
def test_a_quantile_lies_within_its_bucket(counts: tuple[int, ...], share: float, expected: float) -> None:
    def told(values: tuple[int, ...]) -> Sample:
        bounds = zip(("0.1", "0.2", "+Inf"), values, strict=True)
        return samples_of([f'h_bucket{{le="{bound}"}} {value}' for bound, value in bounds], at_s=1)

    assert quantile(told((0, 0, 0)), told(counts), "h", share) == pytest.approx(expected)


def test_a_histogram_that_began_anew_is_taken_as_it_is() -> None:
    before = samples_of(['h_bucket{le="1"} 50', 'h_bucket{le="+Inf"} 100'], at_s=1)
    now = samples_of(['h_bucket{le="1"} 60', 'h_bucket{le="+Inf"} 60'], at_s=2)
    assert quantile(before, now, "h", 0.5) == pytest.approx(0.5)
    assert quantile(now, before, "h", 0.9) == pytest.approx(1.0)  # what lies beyond the last bound is not known


def test_series_are_summed_and_chosen_by_labels() -> None:
    sample = samples_of(['a{x="1",y="1"} 2', 'a{x="1",y="2"} 3', 'a{x="2",y="1"} 5'], at_s=1)
    assert sample.total("a") == 10
    assert sample.total("a", x="1") == 5
    assert sample.total("a", x="1", y="2") == 3
    assert sample.total("a", x="3") is None
    assert (sample.label("a", "y"), sample.label("a", "z"), sample.label("b", "y")) == ("1", "", "")
    histogram = samples_of(
        ['h_bucket{le="+Inf",m="a"} 4', 'h_bucket{le="2",m="a"} 1', 'h_bucket{le="2",m="b"} 2'], at_s=1
    )
    assert histogram.buckets("h") == [(2.0, 3.0), (float("inf"), 4.0)]


def test_growth_is_from_nothing_where_a_counter_is_new() -> None:
    before, now = Sample(1.0, {}), samples_of(["a 6"], at_s=3.0)
    assert (growth(before, now, "a"), rate(before, now, "a")) == (6.0, 3.0)
    assert growth(now, now, "a") == 0.0
    assert rate(now, now, "a") is None
    assert rate(now, before, "a") is None


def test_texts_at_their_bounds() -> None:
    assert [count(value) for value in (0.04, 9.94, 9.96, 10, 10.4, 1, 999, 1000)] == [
        *("0.0", "9.9", "10.0", "10", "10", "1", "999", "1,000")
    ]
    assert [percent(share) for share in (0.0004, 0.0994, 0.1, 0.104, 1.0)] == [
        "0.0 %",
        "9.9 %",
        "10 %",
        "10 %",
        "100 %",
    ]
    values = (0, 0.000994, 0.001, 0.00994, 0.01, 0.9994, 1, 99.94, 100, 123.4)
    assert [seconds(value) for value in values] == [
        *("0.00 ms", "0.99 ms", "1.0 ms", "9.9 ms", "10 ms", "999 ms", "1.0 s", "99.9 s", "100 s", "123 s")
    ]
    assert [bar(share, 2) for share in (-1, 0, 0.0625, 0.5, 0.9375, 1, 2)] == ["  ", "  ", "▏ ", "█ ", "█▉", "██", "██"]
    assert curve([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▂▃▄▅▆▇██"
    assert (curve([], -1), curve([3], 1)) == ("", "█")
    assert chart([0, 1, 2, 4], 4, 1) == [" ▂▄█"]
    assert chart([0.0], 2, 2) == ["  ", "  "]
    assert chart([], 2, 1) == ["  "]


def http_error(url: str, body: bytes) -> urllib.error.HTTPError:
    return urllib.error.HTTPError(url, 503, "x", Message(), io.BytesIO(body))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each URL answers, bytes or an error; notes the URLs that were asked."""
    known: dict[str, Any] = {"asked": []}

    def urlopen(url: str, timeout: float) -> Any:
        assert timeout == 5.0
        known["asked"].append(url)
        answer = known[url]
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer)

    monkeypatch.setattr(sources.urllib.request, "urlopen", urlopen)
    return known


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_frontend_is_asked_below_its_root(answers: dict[str, Any], url: str) -> None:
    answers |= {"http://h:1/metrics": b"a 5\n", "http://h:1/ready": b"{}"}
    source = FrontendSource(url=url)
    assert source.sample().total("a") == 5
    assert source.not_ready_reason() == ""
    assert (source.name, answers["asked"]) == ("http://h:1", ["http://h:1/metrics", "http://h:1/ready"])


def test_a_frontend_says_why_it_is_not_ready(answers: dict[str, Any]) -> None:
    source = FrontendSource(url="http://h:1")
    for body, reason in (
        (json.dumps({"error": {"message": "it loads"}}).encode(), "it loads"),
        (b"no json", "http://h:1/ready answers 503"),
        (b'{"error": "text"}', "http://h:1/ready answers 503"),
        (b"[]", "http://h:1/ready answers 503"),
        (b"{}", "http://h:1/ready answers 503"),
    ):
        answers["http://h:1/ready"] = http_error("u", body)
        assert source.not_ready_reason() == reason
    answers["http://h:1/ready"] = OSError("refused")
    assert source.not_ready_reason() == "no answer from http://h:1: refused"


def test_what_is_no_prometheus_text_is_named(answers: dict[str, Any]) -> None:
    answers["http://h:1/metrics"] = b"<html>\n"
    with pytest.raises(NotReady, match="http://h:1/metrics is no Prometheus text: "):
        FrontendSource(url="http://h:1").sample()


class Scheduler:
    """GetMetrics and GetLoad."""

    def __init__(self, load: types_pb2.EngineLoad) -> None:
        self.load = load

    async def GetMetrics(self, request: Any, timeout: float) -> Any:
        assert timeout == 5.0
        text = b'vllm:iteration_tokens_total_count{model_name="its-model"} 1\n'
        return argparse.Namespace(text=text)

    async def GetLoad(self, request: Any, timeout: float) -> types_pb2.EngineLoad:
        assert timeout == 5.0
        return self.load


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (types_pb2.EngineLoad(is_ready=True, not_ready_reason="old"), ""),
        (types_pb2.EngineLoad(not_ready_reason="no worker"), "no worker"),
        (types_pb2.EngineLoad(), "the engine is starting"),
    ],
)
def test_a_schedulers_load_has_a_frontends_names(load: types_pb2.EngineLoad, reason: str) -> None:
    load.num_running_reqs, load.num_waiting_reqs = 4, 2
    source = SchedulerSource(address="127.0.0.1:9", security=SecurityConfig())
    assert (source.name, source.not_ready_reason()) == ("127.0.0.1:9", "")
    source._stub = Scheduler(load)  # type: ignore[assignment]  # a fake
    sample = source.sample()
    assert sample.total("vllm:num_requests_running", model_name="its-model") == 4
    assert sample.total("vllm:num_requests_waiting", model_name="its-model") == 2
    assert source.not_ready_reason() == reason


def test_a_scheduler_elsewhere_needs_security() -> None:
    with pytest.raises(ConfigError, match="scheduler"):
        SchedulerSource(address="10.0.0.1:9", security=SecurityConfig())
