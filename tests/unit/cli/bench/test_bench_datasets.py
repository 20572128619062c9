"""Prompts of benchmarks at their bounds, with a tokenizer whose tokens are characters; offline benchmarks."""

import argparse
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self, cast

import pytest

from pagoda.bench.datasets import (
    add_dataset_arguments,
    fit_random_lengths,
    ordinary_token_ids,
    random_text,
    read_dataset,
)
from pagoda.bench.engine import make_llm
from pagoda.bench.requests import SampleRequest
from pagoda.bench.text_datasets import SONNET_HEAD
from pagoda.commands import bench_latency, bench_throughput
from pagoda.llm.beam_search import BeamSearchParams
from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.config.flags.flags import engine_config_from_args
from pagoda_common.errors import ConfigError
from pagoda_common.params.sampling_params import SamplingParams

BEGIN = 1


class Characters:
    """A token a character, after one that begins every text."""

    vocab_size = 128
    special_tokens: ClassVar = {"bos_token": "~"}
    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BEGIN] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def token_bytes(self, token_id: int) -> bytes | None:
        return {40: None, 41: b"\xff", 42: b"<|x"}.get(token_id, bytes([token_id]))

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        [message] = messages
        return f"<{message['role']}>{message['content']}"


def read(folder: Path | None, content: str | None, *words: str, num: int = 2, **more: Any) -> list[SampleRequest]:
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    vars(args).update(more)
    if folder is not None and content is not None:
        (folder / "data.json").write_text(content)
        args.dataset_path = str(folder / "data.json")
    return read_dataset(args, cast("Any", Characters()), num_prompts=num)


def test_ordinary_tokens_are_printable_whole_and_not_special() -> None:
    printable = [number for number in range(32, 127) if number not in (40, 41, 42, ord("~"))]
    assert ordinary_token_ids(cast("Any", Characters())) == printable
    nothing = SimpleNamespace(vocab_size=3, special_tokens={}, token_bytes=lambda token_id: b"\n")
    assert ordinary_token_ids(cast("Any", nothing)) == [0, 1, 2]


@pytest.mark.parametrize(("num_tokens", "num_prefix"), [(1, 0), (5, 5), (7, 2)])
def test_a_random_text_has_its_tokens_after_its_prefix(num_tokens: int, num_prefix: int) -> None:
    prefix = [65] * num_prefix
    text, counted = random_text(cast("Any", Characters()), [66, 67], num_tokens, random.Random(0), prefix=prefix)
    assert (len(text), counted) == (num_tokens, num_tokens)
    assert text.startswith("A" * num_prefix)
    assert set(text[num_prefix:]) <= {"B", "C"}


def test_a_random_text_that_is_read_as_others_is_mended() -> None:
    class Merging(Characters):
        """Reads BB as one token, and writes it as D."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text.replace("BB", "D"), add_special_tokens=add_special_tokens)

    text, counted = random_text(cast("Any", Merging()), [66, 67], 20, random.Random(0), prefix=[])
    assert counted == len(Merging().encode(text, add_special_tokens=False)) == 20


def test_random_requests_count_the_servers_own_token() -> None:
    first, second = read(None, None, "--input-len", "10", "--output-len", "4", "--random-prefix-len", "3")
    assert [(one.prompt_len, len(one.prompt), one.output_len) for one in (first, second)] == [(13, 12, 4)] * 2
    assert first.prompt[:3] == second.prompt[:3]
    assert first.prompt != second.prompt


def test_random_lengths_reach_both_ends_of_their_range() -> None:
    words = ("--input-len", "10", "--output-len", "4", "--random-range-ratio", "0.5")
    requests = read(None, None, *words, num=300)
    assert {one.prompt_len for one in requests} == set(range(5, 16))
    assert {one.output_len for one in requests} == set(range(2, 7))
    small = read(None, None, "--input-len", "1", "--output-len", "1", "--random-range-ratio", "0.9", num=20)
    assert {(one.prompt_len, one.output_len) for one in small} == {(2, 1)}, "a text has a token beside the server's"


@pytest.mark.parametrize(
    ("words", "field", "bound"),
    [
        (("--input-len", "0"), "random_input_len", "must be at least 1"),
        (("--output-len", "0"), "random_output_len", "must be at least 1"),
        (("--random-prefix-len", "-1"), "random_prefix_len", "must be at least 0"),
        (("--random-range-ratio", "-0.1"), "random_range_ratio", r"must be in \[0, 1\)"),
        (("--random-range-ratio", "1"), "random_range_ratio", r"must be in \[0, 1\)"),
    ],
)
def test_random_lengths_have_bounds(words: tuple[str, ...], field: str, bound: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {words[1]}.*, {bound}") as caught:
        read(None, None, *words)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("max_model_len", "changes", "fitting"),
    [
        (1000, {}, 1000 - 8 - 100),
        (1000, {"random_prefix_len": 50}, 1000 - 50 - 8 - 100),
        (1000, {"random_range_ratio": 0.5}, (1000 - 8 - 150) / 1.5),
        (1107, {}, 999),
        (1108, {}, None),
        (109, {}, 1),
        (108, {}, None),
        (None, {}, None),
        (1000, {"dataset_name": "custom"}, None),
    ],
)
def test_random_prompts_are_made_to_fit(
    max_model_len: int | None, changes: dict[str, Any], fitting: float | None
) -> None:
    given = {"dataset_name": "random", "random_input_len": 1000, "random_output_len": 100}
    args = argparse.Namespace(**given | {"random_prefix_len": 0, "random_range_ratio": 0.0} | changes)
    told = fit_random_lengths(args, max_model_len)
    if fitting is None:
        assert (args.random_input_len, told) == (1000, "")
        return
    assert args.random_input_len == int(fitting)
    assert told == (
        f"random prompts have {int(fitting)} tokens, so that they fit the server's context of {max_model_len}"
    )


@pytest.mark.parametrize(
    ("num_prompt", "num_answer", "is_taken"),
    [
        (3, 4, True),  # and the token that begins a text
        (2, 4, False),
        (3, 3, False),
        (1023, 10, True),
        (1024, 10, False),
        (999, 1048, True),
        (999, 1049, False),
    ],
)
def test_sharegpt_leaves_out_what_is_too_short_or_too_long(
    tmp_path: Path, num_prompt: int, num_answer: int, is_taken: bool
) -> None:
    talk = [{"value": "p" * num_prompt}, {"value": "a" * num_answer}]
    content = json.dumps([{"conversations": talk}, {"conversations": [{"value": "good one"}, {"value": "good too"}]}])
    found = read(tmp_path, content, "--dataset-name", "sharegpt", "--disable-shuffle", "--no-oversample")
    taken = [SampleRequest("p" * num_prompt, num_prompt + 1, num_answer)] if is_taken else []
    assert found == [*taken, SampleRequest("good one", 9, 8)]


def test_sharegpt_stops_at_the_wanted_number_and_skips_what_is_no_talk(tmp_path: Path) -> None:
    talks: list[Any] = [{"conversations": [{"value": f"question {n}"}, {"value": "answer"}]} for n in range(5)]
    content = json.dumps([{}, {"conversations": None}, {"conversations": [{"value": "alone"}]}, *talks])
    words = ("--dataset-name", "sharegpt", "--disable-shuffle")
    assert [one.prompt for one in read(tmp_path, content, *words)] == ["question 0", "question 1"]
    long = read(tmp_path, content, *words, "--sharegpt-output-len", "33")
    assert [one.output_len for one in long] == [33, 33]
    shuffled = read(tmp_path, content, "--dataset-name", "sharegpt", num=5)
    assert sorted(one.prompt for one in shuffled) == [f"question {n}" for n in range(5)]
    assert [one.prompt for one in shuffled] != [f"question {n}" for n in range(5)]


def test_custom_lines_have_their_length_or_the_flags(tmp_path: Path) -> None:
    content = "\n".join(json.dumps({"prompt": f"p{n}", "output_tokens": n}) for n in range(1, 6)) + "\n\n"
    words = ("--dataset-name", "custom", "--disable-shuffle")
    assert read(tmp_path, content, *words) == [SampleRequest("<user>p1", 9, 256), SampleRequest("<user>p2", 9, 256)]
    own = read(tmp_path, content, *words, "--custom-output-len", "-1", "--skip-chat-template", num=3)
    assert own == [SampleRequest("p1", 3, 1), SampleRequest("p2", 3, 2), SampleRequest("p3", 3, 3)]
    chat = read(tmp_path, content, *words, backend="openai-chat")
    assert [one.prompt for one in chat] == ["p1", "p2"], "the server makes it a conversation"
    assert [one.prompt for one in read(tmp_path, content, *words, backend="openai")] == ["<user>p1", "<user>p2"]
    shuffled = [one.prompt for one in read(tmp_path, content, "--dataset-name", "custom", num=5)]
    assert sorted(shuffled) == [f"<user>p{n}" for n in range(1, 6)]
    assert shuffled != sorted(shuffled)


def test_a_sonnet_has_as_many_lines_as_fit(tmp_path: Path) -> None:
    head = len(SONNET_HEAD) + 1
    poem = "".join(f"line {n:04}\n\n" for n in range(50))  # ten tokens a line
    words = ("--dataset-name", "sonnet", "--sonnet-output-len", "9", "--sonnet-input-len", str(head + 54))
    for prefix_len, num_shared in ((0, 0), (head + 24, 2), (head + 26, 3), (head + 54, 5)):
        first, second = read(tmp_path, poem, *words, "--sonnet-prefix-len", str(prefix_len))
        for one in (first, second):
            assert one.prompt.startswith(SONNET_HEAD)
            lines = one.prompt.removeprefix(SONNET_HEAD).splitlines()
            assert len(lines) == 5
            assert lines[:num_shared] == [f"line {n:04}" for n in range(num_shared)]
            assert (one.prompt_len, one.output_len) == (head + 50, 9)
        assert (first.prompt == second.prompt) is (num_shared == 5)


@pytest.mark.parametrize(
    ("content", "words", "field", "message"),
    [
        ("\n \n", (), "dataset_path", "has no line"),
        (
            "line 0001\n",
            ("--sonnet-prefix-len", "-1"),
            "sonnet_prefix_len",
            r"is -1, must be in \[0, sonnet_input_len\]",
        ),
        ("line 0001\n", ("--sonnet-prefix-len", "551"), "sonnet_prefix_len", "is 551"),
        (
            "line 0001\n",
            ("--sonnet-prefix-len", "0", "--sonnet-input-len", "58"),
            "sonnet_input_len",
            "is 58, must leave room for a line after 54 tokens",
        ),
    ],
)
def test_a_poem_that_does_not_fit_is_refused(
    tmp_path: Path, content: str, words: tuple[str, ...], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, content, "--dataset-name", "sonnet", *words)
    assert caught.value.field == field
    assert len(read(tmp_path, "line 0001\n", "--dataset-name", "sonnet", "--sonnet-prefix-len", "550")) == 2


ROWS: list[Any] = [
    {"article": "7", "problem": "6", "input": "5", "text": "4", "instruction": "3", "question": "2", "prompt": "1"},
    {"article": "7", "problem": "6"},
    {"article": "7"},
    {"input": "5", "text": "4"},
    {"question": "2", "instruction": "3"},
    {"prompt": " ", "input": "5"},
    {"prompt": 5, "conversation": ["d"], "turns": ["c"], "messages": ["b"], "conversations": ["a"]},
    {"conversation": ["d"], "turns": ["c"]},
    {"conversation": [{"value": "v", "content": "c"}]},
    {"turns": [{"content": "c2"}]},
    {"turns": [], "conversation": "text", "messages": [" "], "conversations": [5]},
    "no row",
    {"prompt": "last"},
]


def test_a_row_gives_the_first_prompt_that_it_has(tmp_path: Path) -> None:
    words = ("--dataset-name", "hf", "--disable-shuffle", "--no-oversample", "--hf-output-len", "7")
    found = read(tmp_path, json.dumps(ROWS), *words, num=99)
    expected = ["1", "6", "7", "4", "2", "5", "a", "c", "v", "c2", "last"]
    assert found == [SampleRequest(prompt, len(prompt) + 1, 7) for prompt in expected]
    shuffled = [one.prompt for one in read(tmp_path, json.dumps(ROWS), "--dataset-name", "hf", num=11)]
    assert sorted(shuffled) == sorted(expected)
    assert shuffled != expected
    with pytest.raises(ConfigError, match="has no usable prompt"):
        read(tmp_path, '{"prompt": "an object"}', *words)
    with pytest.raises(ConfigError, match="cannot read the dataset: "):
        read(tmp_path, "no json", *words)


class Engine:
    """An LLM that notes its calls; each takes as long as the clock says."""

    def __init__(self, finish_reason: str = "length") -> None:
        self.calls: list[tuple[Any, Any]] = []
        self.finish_reason = finish_reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(backend=Characters())

    def generate(self, prompts: list[Any], params: Any, *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.calls.append((prompts, params))
        completion = SimpleNamespace(token_ids=[1, 2, 3], finish_reason=self.finish_reason)
        return [SimpleNamespace(prompt_token_ids=[1] * 5, outputs=[completion, completion]) for _ in prompts]

    def beam_search(self, prompts: list[Any], params: Any) -> None:
        self.calls.append((prompts, params))


def run_offline(command: Any, monkeypatch: pytest.MonkeyPatch, llm: Engine, *words: str) -> int:
    """The clock goes on by 0.1, 0.2, 0.3 … seconds."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    now, step = 0.0, 0

    def clock() -> float:
        nonlocal now, step
        step += 1
        now += step / 10
        return now

    monkeypatch.setattr(command, "make_llm", lambda args, parser: llm)
    monkeypatch.setattr(command.time, "perf_counter", clock)
    return int(command.run(parser.parse_args([*words, "--disable-tqdm"]), parser))


def test_latencies_are_of_the_batches_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, path = Engine(), tmp_path / "out.json"
    sizes = ("--input-len", "3", "--output-len", "4", "--batch-size", "2", "--n", "2")
    rounds = ("--num-iters-warmup", "1", "--num-iters", "2", "--output-json", str(path))
    assert run_offline(bench_latency, monkeypatch, llm, *sizes, *rounds) == 0
    figures = json.loads(path.read_text())
    assert figures["latencies"] == pytest.approx([0.4, 0.6])
    assert figures["avg_latency"] == pytest.approx(0.5)
    assert figures["percentiles"] == pytest.approx(
        {"10": 0.42, "25": 0.45, "50": 0.5, "75": 0.55, "90": 0.58, "99": 0.598}
    )
    assert figures.keys() == {"latencies", "avg_latency", "percentiles"}
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Avg latency: 0.5")
    assert [line.partition("%")[0] for line in printed[1:]] == ["10", "25", "50", "75", "90", "99"]
    assert len(llm.calls) == 3
    assert {tuple(map(len, prompts)) for prompts, _ in llm.calls} == {(3, 3)}
    assert len({tuple(map(tuple, prompts)) for prompts, _ in llm.calls}) == 3, "the cache knows none of them"
    assert llm.calls[0][1] == SamplingParams(n=2, temperature=1.0, ignore_eos=True, max_tokens=4)


def test_latencies_of_a_beam_search(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = Engine()
    words = ("--use-beam-search", "--n", "3", "--output-len", "4", "--num-iters", "1", "--num-iters-warmup", "0")
    assert run_offline(bench_latency, monkeypatch, llm, *words) == 0
    assert [params for _, params in llm.calls] == [BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)]


@pytest.mark.parametrize("flag", ["--input-len", "--output-len", "--batch-size", "--n", "--num-iters"])
def test_sizes_of_a_batch_are_at_least_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    llm = Engine()
    with pytest.raises(SystemExit):
        run_offline(bench_latency, monkeypatch, llm, flag, "0")
    assert f"{flag[2:].replace('-', '_')} is 0, must be at least 1" in capsys.readouterr().err
    assert run_offline(bench_latency, monkeypatch, llm, "--num-iters", "1", flag, "1", "--num-iters-warmup", "0") == 0


@pytest.mark.parametrize(("finish_reason", "code"), [("length", 0), ("error", 1)])
def test_throughput_is_tokens_over_time(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    finish_reason: str,
    code: int,
) -> None:
    llm, path = Engine(finish_reason), tmp_path / "out.json"
    words = ("--num-prompts", "4", "--n", "2", "--input-len", "8", "--output-len", "6", "--output-json", str(path))
    assert run_offline(bench_throughput, monkeypatch, llm, *words) == code
    [(prompts, params)] = llm.calls
    assert [len(prompt) for prompt in prompts] == [7] * 4
    assert params == [SamplingParams(n=2, temperature=1.0, ignore_eos=True, max_tokens=6)] * 4
    # 0.2 s for 4 requests with 5 prompt tokens and twice 3 output tokens each
    assert json.loads(path.read_text()) == {
        "elapsed_time": pytest.approx(0.2),
        "num_requests": 4,
        "total_num_tokens": 44,
        "requests_per_second": pytest.approx(20.0),
        "tokens_per_second": pytest.approx(220.0),
    }
    assert capsys.readouterr().out.splitlines() == [
        "Throughput: 20.00 requests/s, 220.00 total tokens/s, 120.00 output tokens/s",
        "Total num prompt tokens:  20",
        "Total num output tokens:  24",
    ]


@pytest.mark.parametrize("flag", ["--num-prompts", "--n"])
def test_throughput_needs_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit):
        run_offline(bench_throughput, monkeypatch, Engine(), flag, "0")
    assert f"{flag[2:].replace('-', '_')} is 0, must be at least 1" in capsys.readouterr().err
    assert run_offline(bench_throughput, monkeypatch, Engine(), "--num-prompts", "1", flag, "1") == 0


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--block-size", "32", "--max-num-seqs", "7", "--data-parallel-size", "2", "--seed", "9"),
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'),
        ("--enable-lora", "--max-loras", "2", "--lora-modules", "style=/s"),
        ("--tls-ca", "ca.pem", "--tls-cert", "c.pem", "--tls-key", "k.pem", "--log-format", "json"),
    ],
)
def test_an_offline_benchmarks_engine_has_all_of_its_flags(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr("pagoda.bench.engine.LLM", lambda **options: made.update(options))
    parser = argparse.ArgumentParser()
    bench_latency.add_arguments(parser)
    args = parser.parse_args(["--model", "m", *words])
    make_llm(args, parser)
    assert engine_config_from_options(**made) == engine_config_from_args(args)


def test_wrong_flags_of_its_engine_end_an_offline_benchmark() -> None:
    parser = argparse.ArgumentParser()
    bench_latency.add_arguments(parser)
    with pytest.raises(SystemExit):
        make_llm(parser.parse_args(["--max-num-seqs", "0"]), parser)
