"""``pagoda bench serve`` against a server with known answers: table, JSON, requests as sent, failures."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli import main
from tests.fakes.openai_server import FakeOpenAIServer

SMALL = ("--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "5", "--disable-tqdm")


def bench(server: FakeOpenAIServer, *flags: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, *SMALL, *flags])


def saved(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("*.json")
    result = json.loads(path.read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_table_and_the_file_have_vllms_names(
    server: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    flags = ("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99.9", "--save-result")
    more = ("--result-dir", str(tmp_path), "--metadata", "gpu=none", "--max-concurrency", "2", "--goodput", "e2el:1e9")
    assert bench(server, "--backend", backend, *flags, *more) == 0
    printed = capsys.readouterr().out
    for text in (
        "============ Serving Benchmark Result ============",
        "Successful requests:                     6         ",
        "Failed requests:                         0         ",
        "Maximum request concurrency:             2         ",
        "Total input tokens:                      66        ",
        "Total generated tokens:                  30        ",
        "Request goodput (req/s):",
        "Output token throughput (tok/s):",
        "Total token throughput (tok/s):",
        "---------------Time to First Token----------------",
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
        "----------------End-to-end Latency----------------",
        "Mean TTFT (ms):",
        "Median TPOT (ms):",
        "P50 ITL (ms):",
        "P99.9 E2EL (ms):",
    ):
        assert text in printed
    result = saved(tmp_path)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert (result["backend"], result["model_id"], result["num_prompts"], result["gpu"]) == (
        backend,
        "pagoda-tiny",
        6,
        "none",
    )
    assert (result["request_rate"], result["burstiness"], result["max_concurrency"]) == ("inf", 1.0, 2)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p50", "p99.9"):
            assert result[f"{statistic}_{metric}_ms"] >= 0
    assert "ttfts" not in result


def test_requests_carry_what_the_flags_say(server: FakeOpenAIServer) -> None:
    flags = ("--ignore-eos", "--top-p", "0.5", "--extra-body", '{"user": "me"}', "--api-key", "k", "--header", "X-A=b")
    assert bench(server, *flags, "--num-warmups", "2") == 0
    assert len(server.bodies) == 1 + 2 + 6
    body = server.bodies[-1]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["top_p"]) == (5, 0.0, True, 0.5)
    assert (body["user"], body["stream"], body["stream_options"]) == ("me", True, {"include_usage": True})
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer k"}
    assert {headers["X-A"] for headers in server.headers} == {"b"}


def test_the_tokenizer_is_that_of_the_checkpoint_and_not_of_its_served_name(
    server: FakeOpenAIServer, tmp_path: Path
) -> None:
    server.model = "a-name-of-our-own"
    assert bench(server, "--save-result", "--result-dir", str(tmp_path)) == 0
    assert server.bodies[0]["model"] == "a-name-of-our-own"
    result = saved(tmp_path)
    assert (result["model_id"], result["tokenizer_id"]) == ("a-name-of-our-own", "pagoda-tiny")


def test_the_same_seed_sends_the_same_prompts(server: FakeOpenAIServer) -> None:
    prompts = []
    for seed in ("1", "1", "2"):
        server.bodies.clear()
        assert bench(server, "--seed", seed) == 0
        prompts.append(sorted(body["prompt"] for body in server.bodies))
    assert prompts[0] == prompts[1] != prompts[2]


def test_details_are_one_entry_a_request(server: FakeOpenAIServer, tmp_path: Path) -> None:
    assert (
        bench(server, "--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--request-rate", "500") == 0
    )
    result = saved(tmp_path)
    assert result["output_lens"] == [5] * 6
    assert result["generated_texts"] == ["w0 w1 w2 w3 w4 "] * 6
    assert [len(itls) for itls in result["itls"]] == [4] * 6
    assert len(result["ttfts"]) == len(result["start_times"]) == 6
    assert result["errors"] == [""] * 6
    assert result["request_rate"] == 500


def test_failed_requests_are_counted_and_named(
    server: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": "status=400 bad"}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(path), "--skip-chat-template", "--no-oversample")
    assert bench(server, *flags, "--custom-output-len", "4", "--disable-shuffle") == 0
    printed = capsys.readouterr()
    assert "Failed requests:                         1         " in printed.out
    assert "1 requests failed, the first one with: HTTP 400: told to fail with 400" in printed.err


def test_a_server_that_cannot_answer_the_first_request_ends_it(
    server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.is_cut = True
    assert bench(server) == 1
    assert "error: the first request failed: the server ended the stream too early" in capsys.readouterr().err


def test_a_server_that_is_not_ready_is_waited_for(
    server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagoda.commands.bench_serve.READY_POLL_S", 0.001)
    server.num_not_ready = 3
    assert bench(server) == 0
    server.num_not_ready = 3
    assert bench(server, "--ready-check-timeout-sec", "0") == 1
    assert "error: HTTP 503: no worker has registered yet" in capsys.readouterr().err


def test_a_server_that_does_not_come_is_not_waited_for_longer_than_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0"]) == 1
    assert "error: no answer from http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-prompts", "0"), "--num-prompts is 0, must be at least 1"),
        (("--request-rate", "0"), "--request-rate is 0.0, must be more than 0"),
        (("--burstiness", "-1"), "burstiness is -1.0"),
        (("--percentile-metrics", "ttft,speed"), "--percentile-metrics has 'speed', must be of ttft, tpot, itl, e2el"),
        (("--metric-percentiles", "101"), "--metric-percentiles has '101', must be in [0, 100]"),
        (("--goodput", "ttft:fast"), "goodput has 'ttft:fast'"),
        (("--goodput", "itl:5"), "goodput has 'itl'"),
        (("--header", "X"), "header has 'X', must be NAME=VALUE"),
        (("--dataset-name", "custom"), "--dataset-name custom needs --dataset-path"),
        (("--random-input-len", "0"), "--random-input-len is 0"),
        (("--random-range-ratio", "1"), "--random-range-ratio is 1.0, must be in [0, 1)"),
    ],
)
def test_wrong_flags_are_named(
    server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(server, *flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
