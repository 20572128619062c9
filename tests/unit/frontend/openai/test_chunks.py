"""Stream chunks, byte by byte what OpenAI's clients expect."""

from typing import Any

import orjson
import pytest

from pagoda_common.params.outputs import SequenceDelta, TokenLogprobs
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.conversation.message import MessageDelta, ToolCallDelta
from pagoda_frontend.openai.chunks import DONE, ChatChunks, ChunkOptions, CompletionChunks
from pagoda_frontend.openai.echo import Echo
from pagoda_frontend.openai.logprobs import LEAST_LOGPROB, LogprobWriter

ENVELOPE = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny"}


def common(**options: Any) -> dict[str, Any]:
    return {
        "envelope": ENVELOPE,
        "options": ChunkOptions(**options),
        "prompts": [[1, 2]],
        "n": 2,
        "usage": lambda: {"total_tokens": 9},
    }


def decode(events: bytes) -> list[Any]:
    assert events.endswith(b"\n\n") or not events
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n")[:-1]]


def delta(text: str, **fields: Any) -> SequenceDelta:
    return SequenceDelta(**{"index": 1, "text": text, "token_ids": [7], "offset": 0, **fields})


def message_delta(content: str, **fields: Any) -> MessageDelta:
    values: dict[str, Any] = {
        **{"index": 1, "reasoning": "", "content": content, "tool_calls": [], "source": delta(content)},
        **{"finish_reason": None, "stop_reason": None, "token_ids": [7], "logprobs": None},
    }
    return MessageDelta(**{**values, **fields})


@pytest.mark.parametrize("text", ["plain", 'quotes " and \\', "line\nbreak", "日本 🙂", "\u2028"])
def test_the_fast_path_equals_the_slow_one(text: str) -> None:
    completion, chat = CompletionChunks(echo=None, **common()), ChatChunks(echo="", **common())
    for [fast], [slow] in (
        (decode(completion.delta(delta(text))), decode(completion.delta(delta(text, finish_reason="stop")))),
        (decode(chat.delta(message_delta(text))), decode(chat.delta(message_delta(text, finish_reason="stop")))),
    ):
        assert fast["choices"][0].pop("finish_reason") is None
        assert slow["choices"][0].pop("finish_reason") == "stop"
        fast["choices"][0].pop("stop_reason", None)
        slow["choices"][0].pop("stop_reason", None)
        assert fast == slow
        assert fast["id"] == "cmpl-1"


def test_the_first_chunk_of_a_chat_has_the_usage_that_every_chunk_is_to_have() -> None:
    opening = decode(ChatChunks(echo="", **common(include_usage=True, continuous_usage=True)).opening())
    assert [chunk["usage"] for chunk in opening] == [{"total_tokens": 9}] * 2
    opening = decode(ChatChunks(echo="", **common(include_usage=True)).opening())
    assert [chunk["usage"] for chunk in opening] == [None] * 2


def test_reasoning_and_tool_calls_have_fields_of_their_own_and_each_call_one_entry() -> None:
    chat = ChatChunks(echo="", **common())
    calls = [
        ToolCallDelta(0, None, None, "}"),
        ToolCallDelta(1, "call_1", "add", ""),
        ToolCallDelta(1, None, None, '{"a"'),
        ToolCallDelta(1, None, None, ": 1"),
    ]
    [chunk] = decode(chat.delta(message_delta("", reasoning="hm", tool_calls=calls)))
    assert chunk["choices"][0]["delta"] == {
        "reasoning": "hm",
        "tool_calls": [
            {"index": 0, "function": {"arguments": "}"}},
            {"index": 1, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}},
        ],
    }
    assert chat.delta(message_delta("")) == b""


def test_a_delta_without_text_is_no_chunk_unless_something_is_asked_for() -> None:
    assert CompletionChunks(echo=None, **common()).delta(delta("")) == b""
    assert decode(CompletionChunks(echo=None, **common()).delta(delta("", finish_reason="length")))
    with_ids = CompletionChunks(echo=None, **common(return_token_ids=True))
    [first], [second] = decode(with_ids.delta(delta(""))), decode(with_ids.delta(delta("a")))
    assert first["choices"][0]["token_ids"] == [7]
    assert first["choices"][0]["prompt_token_ids"] == [1, 2]
    assert "prompt_token_ids" not in second["choices"][0]


def test_each_sequence_begins_with_the_ids_of_its_own_prompt() -> None:
    chunks = CompletionChunks(echo=None, **{**common(return_token_ids=True), "prompts": [[1, 2], [3]]})
    events = [decode(chunks.delta(delta("a", index=index))) for index in range(4)]
    assert [event["choices"][0]["prompt_token_ids"] for [event] in events] == [[1, 2], [1, 2], [3], [3]]


def test_the_log_probabilities_of_an_echoed_prompt_are_counted_once() -> None:
    tokenizer = Tokenizer.load("pagoda-tiny")
    writer = LogprobWriter(tokenizer=tokenizer, num_top=1)
    echo = [Echo(text=None, token_ids=[300, 301], tokenizer=tokenizer, logprobs=writer)]
    known = [[None, TokenLogprobs([301, 5], [-2.0, -1.0], 2)]]
    chunks = CompletionChunks(echo=echo, prompt_logprobs=known, **{**common(), "prompts": [[300, 301]]})
    assert chunks.num_log_probabilities(delta("a")) == 2
    first = decode(chunks.delta(delta("a")))[0]["choices"][0]["logprobs"]
    assert first["token_logprobs"] == [None, -2.0]
    assert [None if one is None else len(one) for one in first["top_logprobs"]] == [None, 2]
    assert chunks.num_log_probabilities(delta("b")) == 0
    assert chunks.num_log_probabilities(delta("b", index=0)) == 2, "of the same prompt's other sequence"
    assert CompletionChunks(echo=None, **common()).num_log_probabilities(delta("a")) == 0
    assert CompletionChunks(echo=echo, **common()).num_log_probabilities(delta("a")) == 0


def test_the_end_of_a_stream() -> None:
    assert CompletionChunks(echo=None, **common()).closing() == DONE
    closing = ChatChunks(echo="", **common(include_usage=True)).closing()
    assert closing.endswith(DONE)
    [last] = decode(closing.removesuffix(DONE))
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 9})


def test_a_conversation_opens_with_a_role_for_each_sequence() -> None:
    opening = decode(ChatChunks(echo="So", **common()).opening())
    assert [chunk["choices"][0]["index"] for chunk in opening] == [0, 1]
    assert all(chunk["choices"][0]["delta"] == {"role": "assistant", "content": "So"} for chunk in opening)


def test_the_ids_of_a_conversation_come_with_its_role() -> None:
    chat = ChatChunks(echo="", **common(return_token_ids=True))
    assert [chunk["prompt_token_ids"] for chunk in decode(chat.opening())] == [[1, 2], [1, 2]]
    [chunk] = decode(chat.delta(message_delta("a")))
    assert chunk["choices"][0]["token_ids"] == [7]
    assert "prompt_token_ids" not in chunk
    assert "prompt_token_ids" not in chunk["choices"][0]
    assert all("prompt_token_ids" not in chunk for chunk in decode(ChatChunks(echo="", **common()).opening()))


def test_minus_infinity_is_written_and_the_sampled_token_is_always_there() -> None:
    writer = LogprobWriter(tokenizer=Tokenizer.load("pagoda-tiny"), num_top=1, as_token_ids=True)
    position = TokenLogprobs(token_ids=[9, 4, 5], logprobs=[float("-inf"), -0.1, -2.0], sampled_rank=90)
    legacy = writer.for_completion([position], [0])
    assert legacy["token_logprobs"] == [LEAST_LOGPROB]
    assert legacy["top_logprobs"] == [{"token_id:9": LEAST_LOGPROB, "token_id:4": -0.1}]
    [entry] = writer.for_chat([position])["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:4"]
