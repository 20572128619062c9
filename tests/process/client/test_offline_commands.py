"""The commands that start an engine of their own: run-batch, bench throughput, bench latency."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 240


def pagoda(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pagoda", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_a_batch_is_answered_by_a_stack_of_its_own(tmp_path: Path) -> None:
    def line(custom_id: str, url: str, **body: Any) -> str:
        body = {"model": "story", "max_tokens": 5, "temperature": 0, **body}
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})

    source, target, config = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "pagoda.yaml"
    lines = [
        line("completion", "/v1/completions", prompt="Once upon a time"),
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}]),
        line("refused", "/v1/completions", prompt="Once", temperature=-1),
        line("vector", "/v1/embeddings", input="Once"),
    ]
    source.write_text("\n".join(lines))
    config.write_text("served-model-name: story\nnum_gpu_blocks_override: 256\ndisable_tqdm: true\n")
    done = pagoda("run-batch", "-i", str(source), "-o", str(target), "--config", str(config))
    assert done.returncode == 0, done.stderr
    assert "3 answered, 1 failed" in done.stderr
    results = {result["custom_id"]: result for result in map(json.loads, target.read_text().splitlines())}
    assert list(results) == ["completion", "chat", "refused", "vector"]
    body = results["completion"]["response"]["body"]
    assert (body["model"], body["usage"]["completion_tokens"]) == ("story", 5)
    assert results["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert results["refused"]["response"]["status_code"] == 400
    assert "temperature" in results["refused"]["error"]["message"]
    assert len(results["vector"]["response"]["body"]["data"][0]["embedding"]) > 100


def test_a_model_that_cannot_be_loaded_ends_a_batch_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    words = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--tokenizer", "pagoda-tiny")
    done = pagoda("run-batch", str(tmp_path / "model"), *words)
    assert done.returncode == 2
    assert "pagoda run-batch: error: the model's architecture, NoSuchModel" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("throughput", "--num-prompts", "4"), ("requests_per_second", "tokens_per_second", "elapsed_time")),
        (
            ("latency", "--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "2"),
            ("avg_latency", "percentiles"),
        ),
    ],
)
def test_an_engine_is_measured(tmp_path: Path, words: tuple[str, ...], keys: tuple[str, ...]) -> None:
    path = tmp_path / "figures.json"
    engine = ("--num-gpu-blocks-override", "256", "--disable-tqdm", "--output-json", str(path))
    done = pagoda("bench", *words, "--input-len", "16", "--output-len", "4", *engine)
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())
    assert all(figures[key] for key in keys)
    if words[0] == "throughput":
        assert figures["total_num_tokens"] >= 4 * (4 + 10)
        assert "Throughput: " in done.stdout
        assert "Total num output tokens:  16" in done.stdout
    else:
        assert len(figures["latencies"]) == 2
        assert set(figures["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
        assert "Avg latency: " in done.stdout
