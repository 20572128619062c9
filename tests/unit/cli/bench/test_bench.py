"""Prompts, send times and figures of the benchmarks, without a server."""

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from pagoda.bench import load
from pagoda.bench.datasets import (
    add_dataset_arguments,
    fit_random_lengths,
    ordinary_token_ids,
    random_text,
    read_dataset,
)
from pagoda.bench.figures import Statistics, is_good, peak_concurrency, peak_tokens_per_s, report, table
from pagoda.bench.load import Load, RequestResult, send_times
from pagoda.bench.requests import SampleRequest, oversample
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.errors import ConfigError
from pagoda_common.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(EMBEDDED_MODEL)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def test_random_prompts_have_the_wanted_number_of_tokens(tokenizer: Tokenizer) -> None:
    args = arguments("--random-input-len", "100", "--random-output-len", "7")
    requests = read_dataset(args, tokenizer, num_prompts=30)
    lengths = Counter(len(tokenizer.encode(request.prompt)) for request in requests)
    assert lengths[100] >= 27  # a text may be read as other tokens than it was made of
    assert [request.prompt_len for request in requests] == [len(tokenizer.encode(r.prompt)) for r in requests]
    assert {request.output_len for request in requests} == {7}
    assert len({request.prompt for request in requests}) == 30


def test_the_special_tokens_that_a_server_adds_count_for_the_wanted_number() -> None:
    stories = Tokenizer.load(str(Path(__file__).resolve().parents[3] / "data/stories260K"))
    requests = read_dataset(arguments("--random-input-len", "40"), stories, num_prompts=20)
    lengths = [len(stories.encode(request.prompt)) for request in requests]
    assert [request.prompt_len for request in requests] == lengths
    assert Counter(lengths).most_common(1)[0][0] == 40


def test_random_lengths_lie_within_the_range_and_prompts_share_the_prefix(tokenizer: Tokenizer) -> None:
    args = arguments("--input-len", "50", "--output-len", "20", "--random-range-ratio", "0.5", "--seed", "3")
    requests = read_dataset(args, tokenizer, num_prompts=50)
    assert all(10 <= request.output_len <= 30 for request in requests)
    assert len({request.output_len for request in requests}) > 5
    assert requests == read_dataset(args, tokenizer, num_prompts=50)
    args.random_prefix_len = 40
    prefixed = read_dataset(args, tokenizer, num_prompts=5)
    assert len({request.prompt[:20] for request in prefixed}) == 1


def test_random_texts_are_of_ordinary_tokens(tokenizer: Tokenizer) -> None:
    vocabulary = ordinary_token_ids(tokenizer)
    assert not set(vocabulary) & {tokenizer.eos_token_id, tokenizer.bos_token_id}
    text, num_tokens = random_text(tokenizer, vocabulary, 12, random.Random(1), prefix=vocabulary[:2])
    assert len(tokenizer.encode(text, add_special_tokens=False)) == num_tokens


def test_a_sonnet_is_lines_of_the_file_after_the_same_first_ones(tokenizer: Tokenizer, tmp_path: Path) -> None:
    poem = tmp_path / "sonnet.txt"
    poem.write_text("".join(f"Line {number} of the poem\n\n" for number in range(40)))
    args = arguments("--dataset-name", "sonnet", "--dataset-path", str(poem), "--sonnet-output-len", "9")
    requests = read_dataset(args, tokenizer, num_prompts=5)
    assert len({request.prompt for request in requests}) == 5
    assert len({request.prompt[:150] for request in requests}) == 1
    assert all(400 < request.prompt_len < 700 and request.output_len == 9 for request in requests)
    args.sonnet_prefix_len = 1000
    with pytest.raises(ConfigError, match="sonnet_prefix_len"):
        read_dataset(args, tokenizer, num_prompts=5)


def test_a_local_dataset_is_read_by_the_columns_that_it_has(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"question": "Why?"}, {"turns": ["How?", "So?"]}, {"messages": [{"role": "user", "content": "What?"}]}, {}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": "Who?"}]}]))
    args = arguments("--dataset-name", "hf", "--dataset-path", str(tmp_path), "--no-oversample")
    requests = read_dataset(args, tokenizer, num_prompts=9)
    assert sorted(request.prompt for request in requests) == ["How?", "What?", "Who?", "Why?"]
    with pytest.raises(ConfigError, match="dataset-path"):
        read_dataset(arguments("--dataset-name", "hf"), tokenizer, num_prompts=1)


def test_sharegpt_takes_first_questions_of_usable_length(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    good = talk("What is a dog and what does it do?", "A dog is an animal that lives with people.", "And a cat?")
    content = [good, talk("only one side of a conversation"), talk("a", "b"), talk("word " * 1200, "too long a prompt")]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(content))
    args = arguments("--dataset-name", "sharegpt", "--dataset-path", str(path))
    requests = read_dataset(args, tokenizer, num_prompts=3)
    assert [request.prompt for request in requests] == ["What is a dog and what does it do?"] * 3
    answer = "A dog is an animal that lives with people."
    assert requests[0].output_len == len(tokenizer.encode(answer, add_special_tokens=False))
    args.no_oversample, args.sharegpt_output_len = True, 9
    [request] = read_dataset(args, tokenizer, num_prompts=3)
    assert request.output_len == 9


def test_custom_prompts_become_conversations_unless_told_otherwise(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 5}\n\n{"prompt": "two", "output_tokens": 6}\n')
    words = ("--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle", "--custom-output-len", "-1")
    first, second = read_dataset(arguments(*words), tokenizer, num_prompts=2)
    assert "<|im_start|>user\none" in first.prompt
    assert (first.output_len, second.output_len) == (5, 6)
    first, _ = read_dataset(arguments(*words, "--skip-chat-template"), tokenizer, num_prompts=2)
    assert first.prompt == "one"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("custom", '{"text": "no prompt"}', "a line is not as it must be"),
        ("custom", "no json", "a line is not as it must be"),
        ("custom", "", "has no usable prompt"),
        ("sharegpt", '{"a": 1}', "is not a JSON list of conversations"),
        ("sharegpt", "[]", "has no usable prompt"),
        ("sharegpt", None, "cannot read the dataset"),
    ],
)
def test_a_file_that_is_no_dataset_is_named(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_dataset(arguments("--dataset-name", name, "--dataset-path", str(path)), tokenizer, num_prompts=2)
    assert caught.value.field == "dataset_path"


@pytest.mark.parametrize("name", ["custom", "sharegpt", "sonnet", "hf"])
def test_a_file_that_is_not_utf_8_or_not_given_is_an_error_of_the_flag(
    tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "latin-1.json"
    path.write_bytes('{"prompt": "à la carte"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="cannot read the dataset: 'utf-8' codec can't decode") as caught:
        read_dataset(arguments("--dataset-name", name, "--dataset-path", str(path)), tokenizer, num_prompts=2)
    assert caught.value.field == "dataset_path"
    with pytest.raises(ConfigError, match=f"--dataset-name {name} needs --dataset-path") as caught:
        read_dataset(arguments("--dataset-name", name), tokenizer, num_prompts=2)
    assert caught.value.field == "dataset_path"


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 10.0])
def test_send_times_meet_the_rate_and_are_as_bursty_as_asked(burstiness: float) -> None:
    times = list(send_times(2000, request_rate=50, burstiness=burstiness, seed=1))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(40)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variation = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
    assert variation == pytest.approx(1 / burstiness, rel=0.25)
    assert times != list(send_times(2000, request_rate=50, burstiness=burstiness, seed=2))


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert list(send_times(3, request_rate=float("inf"), burstiness=1, seed=0)) == [0.0, 0.0, 0.0]


def test_bursts_beyond_what_floats_tell_apart_are_sent_at_once() -> None:
    assert list(send_times(3, request_rate=5, burstiness=1e-9, seed=0)) == [0.0, 0.0, 0.0]


def test_the_endpoint_decides_the_shape_of_the_body(tokenizer: Tokenizer) -> None:
    [request] = read_dataset(arguments("--input-len", "5"), tokenizer, num_prompts=1)
    assert "prompt" in Load(backend="openai", model="m").body(request)
    assert "messages" in Load(backend="openai-chat", model="m").body(request)
    assert "messages" in Load(backend="openai", model="m", endpoint="/x/v1/chat/completions").body(request)


RESULTS = [
    RequestResult(prompt_len=10, start_s=0.0, end_s=1.0, ttft_s=0.2, itl_s=[0.4, 0.4], text="a", output_len=3),
    RequestResult(prompt_len=20, start_s=0.5, end_s=0.9, ttft_s=0.4, itl_s=[], text="b", output_len=1),
    RequestResult(prompt_len=30, start_s=0.6, error="HTTP 500"),
]


def test_figures_are_of_what_succeeded() -> None:
    figures = report(RESULTS, duration_s=2.0, percentiles=[50], goodput_ms={"ttft": 300})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 4)
    assert (figures["request_throughput"], figures["output_throughput"]) == (1.0, 2.0)
    assert figures["total_token_throughput"] == 17.0
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(300)
    assert figures["mean_tpot_ms"] == pytest.approx(400)  # an answer of one token has none
    assert figures["p50_itl_ms"] == pytest.approx(400)
    assert figures["mean_e2el_ms"] == pytest.approx(700)
    assert figures["errors"] == ["", "", "HTTP 500"]
    assert report([], duration_s=1.0, percentiles=[99])["p99_ttft_ms"] == 0.0


def test_peaks_are_over_seconds_and_overlaps() -> None:
    assert peak_tokens_per_s(RESULTS[:2]) == 3.0
    assert peak_concurrency(RESULTS[:2]) == 2
    assert peak_concurrency([]) == 0


def test_a_request_that_starts_as_another_ends_does_not_run_beside_it() -> None:
    results = [RequestResult(prompt_len=1, start_s=float(start), end_s=start + 1.0) for start in range(3)]
    assert peak_concurrency(results) == 1


def test_requests_that_ended_do_not_count_for_later_ones() -> None:
    spans = [(0.0, 1.0), (2.0, 4.0), (3.0, 5.0)]
    assert peak_concurrency([RequestResult(prompt_len=1, start_s=start, end_s=end) for start, end in spans]) == 2


@pytest.mark.parametrize(("bound_ms", "is_within"), [(250, True), (249, False)])
@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2el"])
def test_a_request_is_good_up_to_its_bound(metric: str, bound_ms: float, is_within: bool) -> None:
    result = RequestResult(prompt_len=1, start_s=0.0, ttft_s=0.25, output_len=2)
    result.end_s = 0.25 if metric == "e2el" else 0.5
    assert is_good(result, {metric: bound_ms}) is is_within


async def test_times_are_those_of_the_tokens_and_not_of_the_figures_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Client:
        async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
            for text in "ab":
                yield {"choices": [{"text": text}]}
            yield {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 9}}

    ticks = itertools.count(1)
    monkeypatch.setattr(load.time, "perf_counter", lambda: float(next(ticks)))
    request = SampleRequest(prompt="x", prompt_len=1, output_len=5)
    result = await load.send_one(cast("Any", Client()), request, Load(backend="openai", model="m"))
    assert (result.start_s, result.ttft_s, result.itl_s, result.end_s) == (1.0, 1.0, [1.0], 3.0)
    assert (result.text, result.prompt_len, result.output_len, result.error) == ("ab", 9, 2, "")


def test_statistics_are_in_milliseconds() -> None:
    statistics = Statistics.of([0.1, 0.2, 0.3, 0.4], [25.0])
    assert statistics.mean == pytest.approx(250)
    assert statistics.median == pytest.approx(250)
    assert statistics.percentiles[25.0] == pytest.approx(175)


def test_the_table_has_the_metrics_that_are_asked_for() -> None:
    figures = report(RESULTS, duration_s=2.0, percentiles=[99])
    shown = table(figures, metrics=["itl"], percentiles=[99], request_rate=4.0)
    assert "P99 ITL (ms):" in shown
    assert "TTFT" not in shown
    assert "Request rate configured (RPS):           4.00" in shown
    assert "goodput" not in shown
    assert {len(line) for line in shown.splitlines() if line.startswith(("=", "-"))} == {50}


@pytest.mark.parametrize(("max_model_len", "input_len"), [(1024, 888), (4096, 1024), (None, 1024), (100, 1024)])
def test_random_prompts_that_nobody_sized_fit_the_servers_context(max_model_len: int | None, input_len: int) -> None:
    args = argparse.Namespace(
        dataset_name="random",
        random_input_len=1024,
        random_output_len=128,
        random_prefix_len=0,
        random_range_ratio=0.0,
    )
    told = fit_random_lengths(args, max_model_len)
    assert args.random_input_len == input_len
    assert bool(told) is (input_len != 1024)


def test_files_of_subfolders_are_read_in_the_order_of_their_paths(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("b/two.jsonl", "a/deep/one.jsonl", "c/other.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"text": path.stem}) + "\n")
    args = arguments("--dataset-name", "hf", "--dataset-path", str(tmp_path), "--no-oversample", "--disable-shuffle")
    assert [one.prompt for one in read_dataset(args, tokenizer, num_prompts=9)] == ["one", "two"]
    assert [one.prompt for one in read_dataset(args, tokenizer, num_prompts=1)] == ["one"]


@pytest.mark.parametrize(
    ("num_prompts", "is_kept", "num_made"), [(1, False, 2), (2, False, 2), (5, False, 5), (5, True, 2)]
)
def test_too_few_requests_are_drawn_again_unless_told_not_to(num_prompts: int, is_kept: bool, num_made: int) -> None:
    requests = [SampleRequest(name, 1, 1) for name in "ab"]
    args = argparse.Namespace(dataset_path="p", no_oversample=is_kept)
    made = oversample(requests, args, num_prompts, random.Random(1))
    assert (made[:2], len(made)) == (requests, num_made)
    assert set(made) == set(requests)
    with pytest.raises(ConfigError, match="p has no usable prompt"):
        oversample([], args, 1, random.Random(1))
