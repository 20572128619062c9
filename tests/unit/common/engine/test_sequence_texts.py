"""The text of a sequence, token by token: every field, stop strings, ends, and what a stream does with them."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.engine.generation import SequenceText, TextStream, generate_text
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import QueueFull, RequestFailed
from pagoda_common.params.outputs import EngineOutput, HypothesisLogprobs, TokenLogprobs
from pagoda_common.params.sampling_params import SamplingParams


class Letters:
    """A token is a letter; 0 is held back until the next one, as half of a character is."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self._held = ""

    def detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        self.asked.append((prompt_token_ids, skip_special_tokens))
        return self

    def append(self, token_ids: list[int]) -> str:
        text = ""
        for token_id in token_ids:
            self._held += chr(token_id) if token_id else "?"
            if token_id:
                text, self._held = text + self._held, ""
        return text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def ids(text: str) -> list[int]:
    return [0 if letter == "?" else ord(letter) for letter in text]


def made(tokenizer: Any = None, **params: Any) -> SequenceText:
    request = EngineRequest(request_id="r", prompt_token_ids=[5, 6], sampling_params=SamplingParams(**params))
    return SequenceText(
        index=3, request=request, tokenizer=tokenizer if tokenizer is not None else cast("Any", Letters())
    )


def output(text: str, offset: int = 0, **fields: Any) -> EngineOutput:
    return EngineOutput(index=3, offset=offset, token_ids=ids(text), **fields)


def entry(number: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[number], logprobs=[-1.0], sampled_rank=1)


def test_every_field_of_an_output_is_in_the_news() -> None:
    hypothesis, embedding = HypothesisLogprobs(-1.0, [-1.0], [1]), cast("Any", object())
    delta = made().append(
        output(
            "ab",
            offset=7,
            finish_reason="length",
            stop_token_id=9,
            num_cached_tokens=4,
            num_preemptions=2,
            queue_s=0.5,
            hypothesis=hypothesis,
            embedding=embedding,
        )
    )
    assert (delta.index, delta.text, delta.token_ids, delta.offset) == (3, "ab", ids("ab"), 7)
    assert (delta.finish_reason, delta.stop_reason, delta.num_cached_tokens) == ("length", 9, 4)
    assert (delta.num_preemptions, delta.queue_s, delta.hypothesis) == (2, 0.5, hypothesis)
    assert delta.embedding is embedding
    assert (delta.logprobs, delta.token_text_offsets, delta.num_output_tokens) == (None, [], 2)


@pytest.mark.parametrize("skips", [True, False])
def test_the_detokenizer_goes_on_after_the_prompt(skips: bool) -> None:
    tokenizer = Letters()
    made(tokenizer, skip_special_tokens=skips)
    assert tokenizer.asked == [([5, 6], skips)]
    silent = Letters()
    assert made(silent, detokenize=False).append(output("ab")).text == ""
    assert silent.asked == []


def test_tokens_are_counted_with_and_without_text() -> None:
    for text in (made(), made(detokenize=False), made(stop=["x"])):
        assert text.append(output("ab")).num_output_tokens == 2
        assert text.append(output("c")).num_output_tokens == 3


@pytest.mark.parametrize(
    ("reason", "includes", "stop", "text"),
    [
        ("stop", False, None, "a"),
        ("stop", True, None, "ab"),
        ("length", False, None, "ab"),
        ("stop", False, "x", "a"),
        ("stop", True, "x", "ab"),
    ],
)
def test_a_token_that_ends_a_sequence_is_no_text(reason: Any, includes: bool, stop: str | None, text: str) -> None:
    sequence = made(include_stop_str_in_output=includes, stop=stop)
    delta = sequence.append(output("ab", finish_reason=reason))
    assert (delta.text, delta.token_ids, delta.num_output_tokens) == (text, ids("ab"), 2)
    assert made().append(output("", finish_reason="stop")).text == ""


def test_what_is_held_back_comes_with_the_end() -> None:
    for stop in (None, "x"):
        sequence = made(stop=stop)
        assert sequence.append(output("a?")).text == "a"
        assert sequence.append(output("", finish_reason="length")).text == "?"
    sequence = made(stop=["bc"])
    assert sequence.append(output("ab")).text == "a"
    assert sequence.append(output("", finish_reason="length")).text == "b"
    late = made(stop=["b?"])
    assert late.append(output("ab?")).text == "a"
    end = late.append(output("", finish_reason="length"))
    assert (end.text, end.finish_reason, end.stop_reason) == ("", "stop", "b?")
    assert late.has_met_stop_string


@pytest.mark.parametrize(("includes", "text"), [(False, "a"), (True, "abc")])
def test_a_stop_string_ends_a_sequence(includes: bool, text: str) -> None:
    sequence = made(stop=["bc", "zz"], include_stop_str_in_output=includes)
    entries = [entry(number) for number in range(5)]
    delta = sequence.append(output("abcde", logprobs=entries, finish_reason="length", stop_token_id=9))
    assert (delta.text, delta.token_ids, delta.logprobs) == (text, ids("abc"), entries[:3])
    assert (delta.finish_reason, delta.stop_reason, delta.num_output_tokens) == ("stop", "bc", 3)
    assert delta.token_text_offsets == [0, 1, 2]
    assert sequence.has_met_stop_string


def test_stop_strings_are_not_looked_for_among_the_least_tokens() -> None:
    delta = made(stop=["b"], min_tokens=2).append(output("abab"))
    assert (delta.text, delta.num_output_tokens) == ("aba", 4)
    other = made(stop=["b"], min_tokens=1).append(output("abab"))
    assert (other.text, other.num_output_tokens) == ("a", 2)


def test_the_place_of_each_token_in_the_text() -> None:
    sequence = made(logprobs=0)
    first = sequence.append(output("a?b", logprobs=[entry(1), entry(2), entry(3)]))
    assert (first.text, first.token_text_offsets) == ("a?b", [0, 1, 1])
    second = sequence.append(output("cd", offset=3, logprobs=[entry(4), entry(5)], finish_reason="stop"))
    assert (second.text, second.token_text_offsets) == ("c", [3, 4])
    plain = made()
    plain.append(output("ab"))
    assert plain.append(output("c", logprobs=[entry(1)])).token_text_offsets == [2]
    held = made(stop=["cx"])
    assert held.append(output("abc")).text == "ab"
    assert held.append(output("d")).token_text_offsets == [3], "what is held back counts"


# Streams.


class Stream:
    """Returns fixed answers and records the questions."""

    def __init__(self, *news: list[EngineOutput]) -> None:
        self._news = list(news)
        self.asked: list[int] = []
        self.told: list[Any] = []
        self.prompt_logprobs: Any = None
        self.expired = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        return not self._news

    async def get(self, *, at_least: int = 1) -> list[EngineOutput]:
        self.asked.append(at_least)
        return self._news.pop(0)

    def stop(self, index: int) -> None:
        self.told.append(("stop", index))

    def abort(self) -> None:
        self.told.append("abort")

    def drop(self) -> None:
        self.told.append("drop")

    def expire(self) -> None:
        self.told.append("expire")
        self.expired.set()


def stream_of(stream: Stream, *, timeout_s: float = 0.0, **params: Any) -> TextStream:
    request = EngineRequest(
        request_id="r", prompt_token_ids=[5], sampling_params=SamplingParams(**params), timeout_s=timeout_s
    )
    engine = SimpleNamespace(submit=lambda given: stream)
    return TextStream(engine=cast("Any", engine), tokenizer=cast("Any", Letters()), request=request)


def piece(index: int, text: str, **fields: Any) -> EngineOutput:
    return EngineOutput(index=index, offset=0, token_ids=ids(text), **fields)


async def test_news_of_all_sequences() -> None:
    stream = Stream([piece(1, "b"), piece(0, "a")])
    stream.prompt_logprobs = [None]
    texts = stream_of(stream, n=2)
    assert not texts.is_finished
    deltas = await texts.get(at_least=5)
    assert [(delta.index, delta.text, delta.is_replayed) for delta in deltas] == [(1, "b", False), (0, "a", False)]
    assert {id(delta.prompt_logprobs) for delta in deltas} == {id(stream.prompt_logprobs)}
    assert texts.prompt_logprobs is stream.prompt_logprobs
    assert (stream.asked, texts.is_finished) == ([5], True)
    texts.close()
    assert stream.told == ["abort", "drop"]


async def test_with_stop_strings_every_token_counts_and_what_met_one_is_stopped() -> None:
    stream = Stream([piece(0, "a"), piece(1, "xb")])
    texts = stream_of(stream, n=2, stop=["x"])
    deltas = await texts.get(at_least=5)
    assert stream.asked == [1]
    assert [(delta.index, delta.text) for delta in deltas] == [(0, "a"), (1, "")]
    assert stream.told == [("stop", 1)]


async def test_a_sequence_that_fails_ends_the_request() -> None:
    for error, kind, message in (
        (QueueFull("full"), QueueFull, "full"),
        (None, RequestFailed, "the engine failed this request"),
    ):
        with pytest.raises(kind, match=message):
            await stream_of(Stream([piece(0, "", finish_reason="error", error=error)])).get()


async def test_a_time_limit_counts_here_as_well() -> None:
    stream = Stream([])
    texts = stream_of(stream, timeout_s=0.001)
    await stream.expired.wait()
    assert stream.told == ["expire"]
    texts.close()
    unbounded = stream_of(Stream())
    assert unbounded._deadline is None
    closed = Stream()
    stream_of(closed, timeout_s=0.001).close()
    await asyncio.sleep(0.01)
    assert closed.told == ["abort", "drop"]


async def test_all_news_until_the_end() -> None:
    stream = Stream([piece(0, "a")], [], [piece(0, "b", finish_reason="length")])
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling_params=SamplingParams())
    engine = SimpleNamespace(submit=lambda given: stream)
    tokenizer = cast("Any", Letters())
    found = [deltas[0].text async for deltas in generate_text(cast("Any", engine), tokenizer, request)]
    assert found == ["a", "b"], "no empty news"
    assert stream.told == ["abort", "drop"]
