"""pagoda top: what two scrapes say, the frame at 80 columns, and how it ends."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pagoda.cli import main
from pagoda.commands import top
from pagoda.top.frame import draw
from pagoda.top.sample import Sample, growth, quantile, rate
from pagoda.top.text import Paint, bar, chart, count, curve, percent, seconds

METRICS = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="a-model",engine="0"}} 12.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="a-model",engine="0"}} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model_name="a-model",engine="0"}} 0.5
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",num_gpu_blocks="400",engine="0"}} 1.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} {n}
vllm:time_to_first_token_seconds_bucket{{le="0.2"}} {n2}
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {n2}
# TYPE pagoda:sampled_tokens counter
pagoda:sampled_tokens_total {n2}
# TYPE pagoda:worker_losses counter
pagoda:worker_losses_total{{engine="0"}} 2.0
# TYPE pagoda:group_info gauge
pagoda:group_info{{group="0",state="serving",device="cpu, 2 cores"}} 1.0
pagoda:group_info{{group="1",state="standby",device="{device}"}} 1.0
# TYPE pagoda:group_requests_running gauge
pagoda:group_requests_running{{group="0"}} 12.0
# TYPE pagoda:step_seconds histogram
pagoda:step_seconds_count{{stage="forward"}} {n}
pagoda:step_seconds_sum{{stage="forward"}} {spent}
"""


def scrape(n: int, *, at_s: float) -> Sample:
    """After `n` steps of 5 ms with two tokens each."""
    text = METRICS.format(n=float(n), n2=2.0 * n, spent=n * 0.005, device="a device with a very long name " * 4)
    return Sample.parse(text, at_s=at_s)


def shown(samples: list[Sample], *, width: int = 80, reason: str = "") -> list[str]:
    return draw(samples, name="http://127.0.0.1:8000", reason=reason, width=width, paint=Paint(is_on=False))


def test_a_tall_terminal_has_a_chart_and_a_short_one_does_not() -> None:
    samples = [scrape(100, at_s=10), scrape(150, at_s=12), scrape(250, at_s=14)]
    frames = [
        draw(samples, name="x", reason="", width=80, paint=Paint(is_on=False), height=height) for height in (0, 24, 60)
    ]
    assert frames[0] == frames[1]
    assert any("tokens a second, at most 100" in line for line in frames[2])
    assert len(frames[2]) <= 60
    assert max(map(len, frames[2])) <= 80


def test_a_chart_is_as_high_as_its_largest_value() -> None:
    assert chart([1.0, 4.0, 2.0], 5, 2) == ["   █ ", "  ▄██"]


def test_counters_grow_and_may_begin_anew() -> None:
    before, now = scrape(100, at_s=10), scrape(150, at_s=12)
    assert growth(before, now, "pagoda:sampled_tokens_total") == 100
    assert rate(before, now, "pagoda:sampled_tokens_total") == 50
    assert growth(now, before, "pagoda:sampled_tokens_total") == 200
    assert growth(before, now, "no_such_metric") is None
    assert now.total("pagoda:group_requests_running", group="1") is None


def test_quantiles_are_of_what_came_in_between() -> None:
    before, now = scrape(100, at_s=10), scrape(150, at_s=12)
    assert quantile(before, now, "vllm:time_to_first_token_seconds", 0.5) == pytest.approx(0.1)
    assert quantile(before, now, "vllm:time_to_first_token_seconds", 0.75) == pytest.approx(0.15)
    assert quantile(now, now, "vllm:time_to_first_token_seconds", 0.5) is None
    assert quantile(before, now, "no_such_metric", 0.5) is None


def test_latencies_are_of_the_last_minute() -> None:
    """200 slow ones long ago, then 100 of which half took up to 0.1 s, and the others up to 0.2 s."""
    samples = [scrape(0, at_s=0), scrape(0, at_s=40), scrape(50, at_s=99.5), scrape(100, at_s=100)]
    assert "first token 100 ms" in "\n".join(shown(samples))
    long_ago = Sample.parse(METRICS.format(n=0.0, n2=1000.0, spent=0.0, device="d"), at_s=10)
    later = Sample.parse(METRICS.format(n=100.0, n2=1100.0, spent=0.0, device="d"), at_s=100)
    since = Sample.parse(METRICS.format(n=0.0, n2=1000.0, spent=0.0, device="d"), at_s=41)
    assert "first token 50 ms p95 95 ms" in "\n".join(shown([scrape(0, at_s=0), long_ago, since, later]))
    assert "first token 50 ms p95 95 ms" not in "\n".join(shown([scrape(0, at_s=45), later])), "a minute is not over"


def test_a_frame_fits_its_width_and_says_it_all() -> None:
    samples = [scrape(n, at_s=n / 100) for n in range(100, 400, 100)]
    for width in (60, 80, 100):
        lines = shown(samples, width=width)
        assert max(map(len, lines)) <= width
    text = "\n".join(shown(samples))
    for part in (
        *("a-model", "running 12", "waiting 3", "50 % of 6,400 tokens", "tokens/s 200"),
        *("recoveries 2 worker", "serving", "standby", "step         5.0 ms"),
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert re.search(r"forward +5\.0 ms +█+", text)


def test_colours_add_nothing_to_the_text() -> None:
    samples = [scrape(100, at_s=1), scrape(200, at_s=2)]
    painted = draw(samples, name="x", reason="why", width=80, paint=Paint(is_on=True))
    plain = draw(samples, name="x", reason="why", width=80, paint=Paint(is_on=False))
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in painted] == plain
    assert painted != plain


def test_a_server_that_does_not_serve_says_why() -> None:
    assert "no worker has registered yet" in shown([], reason="no worker has registered yet")
    assert "no worker has registered" in "\n".join(shown([Sample.parse("", at_s=0)]))


def test_figures_are_short() -> None:
    assert [count(value) for value in (None, 0, 3.44, 12345.6)] == ["–", "0", "3.4", "12,346"]
    assert [percent(share) for share in (None, 0, 0.004, 0.41)] == ["–", "0 %", "0.4 %", "41 %"]
    assert [seconds(value) for value in (None, 5e-5, 0.0041, 0.673, 2.5)] == [
        "–",
        "0.05 ms",
        "4.1 ms",
        "673 ms",
        "2.5 s",
    ]
    assert [bar(0.5, 4), bar(2.0, 3), bar(1 / 16, 2)] == ["██  ", "███", "▏ "]
    assert curve([0, 5, 10], 5) == "  ▁▅█"
    assert curve([9, 9, 0, 5, 10], 3) == "▁▅█", "the latest ones"
    assert (curve([1.0], 0), curve([], 3), curve([0, 0], 2)) == ("", "   ", "▁▁")
    assert chart([9.0, 9.0, 1.0, 4.0, 2.0], 3, 2) == [" █ ", "▄██"]


@pytest.fixture
def server() -> Iterator[str]:
    """A frontend that is not ready."""

    class Handler(BaseHTTPRequestHandler):
        num_scrapes = 0

        def do_GET(self) -> None:
            body, status = b'{"error": {"message": "the model is being loaded"}}', 503
            if self.path == "/metrics":
                Handler.num_scrapes += 1
                body, status = METRICS.format(n=100.0, n2=200.0, spent=0.5, device="d").encode(), 200
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    serving = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_once_prints_one_frame(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["top", "--once", "--interval", "0.1", "--url", f"{server}/v1"]) == 0
    printed = capsys.readouterr().out
    assert "running 12" in printed
    assert "the model is being loaded" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize("flags", [["--url", "http://127.0.0.1:1"], ["--scheduler", "127.0.0.1:1"]])
def test_once_without_an_answer_is_an_error(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", *flags]) == 1
    assert re.fullmatch(r"pagoda top: error: no answer from .*127\.0\.0\.1:1: .*\n", capsys.readouterr().err)


def test_no_terminal_is_a_wrong_use() -> None:
    command = [sys.executable, "-m", "pagoda", "top"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert "--once" in done.stderr


def test_q_ends_the_live_view_and_leaves_the_terminal_as_it_was(server: str) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "pagoda", "top", "--interval", "60", "--url", server]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "COLUMNS": "80"})
    os.close(slave)
    try:
        printed = b""
        while b"q ends" not in printed:
            printed += os.read(master, 65536)
        os.write(master, b"q")
        assert process.wait(240) == 0
        printed += os.read(master, 65536)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert "running" in printed.decode()
    assert printed.startswith(b"\x1b[?1049h")
    assert printed.rstrip().endswith(b"\x1b[?1049l")


def test_a_key_is_read_at_once_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        assert top._key(0.0) == ""
        os.write(write, b" q")
        assert [top._key(0.0), top._key(0.0), top._key(0.0)] == [" ", "q", ""]
        os.close(write)
        assert top._key(0.0) == "q", "the terminal is gone"


@pytest.mark.parametrize("fault", [None, KeyboardInterrupt()])
def test_a_terminal_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: BaseException | None
) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "rb", buffering=0) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        before = termios.tcgetattr(terminal)
        with contextlib.suppress(KeyboardInterrupt), top._raw_terminal():
            assert not termios.tcgetattr(terminal)[3] & (termios.ICANON | termios.ECHO), "keys come one by one"
            if fault is not None:
                raise fault
        assert termios.tcgetattr(terminal) == before
    os.close(master)
    assert capsys.readouterr().out == "\x1b[?1049h\x1b[?25l\x1b[?25h\x1b[?1049l"
