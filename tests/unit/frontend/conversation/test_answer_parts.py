"""Answers and events in full: log probabilities, chunks, echoes and blocks of the Messages API."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.errors import InvalidRequest, RequestFailed
from pagoda_common.params.outputs import SequenceDelta, TokenLogprobs
from pagoda_frontend.conversation.message import MessageDelta, ToolCallDelta
from pagoda_frontend.messages.handlers import _events
from pagoda_frontend.messages.output import BlockBuilder
from pagoda_frontend.openai.chunks import DONE, ChatChunks, ChunkOptions, CompletionChunks, chunk_options, event
from pagoda_frontend.openai.echo import Echo
from pagoda_frontend.openai.logprobs import LogprobWriter, logprob_writer, num_top_logprobs, prompt_logprobs_by_id
from pagoda_frontend.openai.protocol import ChatBody

INF = float("-inf")


class Letters:
    """Token 1 is "b", 2 is "c", …; 20 and 21 are bytes of a character, 22 is another "b"."""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {20: b"\xe4", 21: b"\xf0\x9f", 22: b"b"}.get(token_id, bytes([97 + token_id]))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(self.token_text, token_ids))

    def detokenizer(self, *, skip_special_tokens: bool) -> Any:
        skipped = {0} if skip_special_tokens else set()
        return SimpleNamespace(append=lambda ids: "".join(self.token_text(one) for one in ids if one not in skipped))


LETTERS = cast("Any", Letters())
FIRST = TokenLogprobs([3, 1, 2], [-2.0, -0.5, -1.0], 9)
SECOND = TokenLogprobs([1, 1, 2], [-0.5, -0.5, -1.0], 1)


def writer(num_top: int = 1, **more: Any) -> LogprobWriter:
    return LogprobWriter(tokenizer=LETTERS, num_top=num_top, **more)


def test_log_probabilities_of_a_completion_are_lists() -> None:
    assert writer().for_completion([FIRST, SECOND], [0, 5]) == {
        "text_offset": [0, 5],
        "token_logprobs": [-2.0, -0.5],
        "tokens": ["d", "b"],
        "top_logprobs": [{"d": -2.0, "b": -0.5}, {"b": -0.5}],
    }
    assert writer(0).for_completion([FIRST], [0])["top_logprobs"] == [{"d": -2.0}]
    assert writer(-1).for_completion([FIRST], [0])["top_logprobs"] == [{"d": -2.0, "b": -0.5, "c": -1.0}]
    named = writer(2, as_token_ids=True).for_completion([FIRST], [0])
    assert (named["tokens"], list(named["top_logprobs"][0])) == (
        ["token_id:3"],
        ["token_id:3", "token_id:1", "token_id:2"],
    )
    assert writer().for_completion([], []) == {
        "text_offset": [],
        "token_logprobs": [],
        "tokens": [],
        "top_logprobs": [],
    }


def test_tokens_of_the_same_text_have_names_of_their_own() -> None:
    position = TokenLogprobs([20, 21, 1, 22], [-1.0, -2.0, -3.0, INF], 1)
    [top] = writer(-1).for_completion([position], [0])["top_logprobs"]
    assert top == {"�": -1.0, "bytes:\\xf0\\x9f": -2.0, "b": -3.0, "token_id:22": -9999.0}


def test_log_probabilities_of_a_conversation_are_objects() -> None:
    assert writer(2).for_chat([FIRST]) == {
        "content": [
            {
                "token": "d",
                "logprob": -2.0,
                "bytes": [100],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.5, "bytes": [98]},
                    {"token": "c", "logprob": -1.0, "bytes": [99]},
                ],
            }
        ],
        "refusal": None,
    }
    [entry] = writer(0).for_chat([TokenLogprobs([21], [INF], 1)])["content"]
    assert (entry["bytes"], entry["logprob"], entry["top_logprobs"]) == ([0xF0, 0x9F], -9999.0, [])


def test_log_probabilities_of_a_prompt_begin_with_null() -> None:
    assert writer().for_prompt([4, 3, 1], [None, FIRST, SECOND], [0, 1, 2]) == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -2.0, -0.5],
        "tokens": ["e", "d", "b"],
        "top_logprobs": [None, {"d": -2.0, "b": -0.5}, {"b": -0.5}],
    }


def test_log_probabilities_of_a_prompt_by_token() -> None:
    assert prompt_logprobs_by_id(None, LETTERS) is None
    assert prompt_logprobs_by_id([None, FIRST, TokenLogprobs([1, 1, 2], [INF, -0.5, -1.0], 1)], LETTERS) == [
        None,
        {
            "3": {"logprob": -2.0, "rank": 9, "decoded_token": "d"},
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "2": {"logprob": -1.0, "rank": 2, "decoded_token": "c"},
        },
        {
            "1": {"logprob": -9999.0, "rank": 1, "decoded_token": "b"},
            "2": {"logprob": -1.0, "rank": 2, "decoded_token": "c"},
        },
    ]


@pytest.mark.parametrize(
    ("logprob", "shown"), [(-9998.5, -9998.5), (-9999.0, -9999.0), (-9999.5, -9999.0), (INF, -9999.0), (0.0, 0.0)]
)
def test_minus_infinity_is_a_number(logprob: float, shown: float) -> None:
    assert writer().for_completion([TokenLogprobs([1], [logprob], 1)], [0])["token_logprobs"] == [shown]


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [], **fields})


@pytest.mark.parametrize(
    ("fields", "is_default", "expected"),
    [
        ({}, False, writer(3)),
        ({}, True, writer(3, as_token_ids=True)),
        ({"return_tokens_as_token_ids": False}, True, writer(3)),
        ({"return_tokens_as_token_ids": True}, False, writer(3, as_token_ids=True)),
        ({"logprob_token_ids": [5]}, False, writer(-1)),
    ],
)
def test_who_writes_log_probabilities(fields: dict[str, Any], is_default: bool, expected: LogprobWriter) -> None:
    assert logprob_writer(chat(**fields), LETTERS, 3, as_token_ids=is_default) == expected
    assert logprob_writer(chat(**fields), LETTERS, None, as_token_ids=is_default) is None


@pytest.mark.parametrize(
    ("fields", "bound", "expected"),
    [
        ({}, 5, None),
        ({"logprobs": True}, 5, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5, 5),
        ({"logprobs": True, "top_logprobs": -1}, -1, -1),
        ({"logprobs": True, "top_logprobs": -1}, 100, -1),
        ({"top_logprobs": 0}, 5, None),
        ({"logprobs": True, "top_logprobs": 6}, 5, "top_logprobs must be at most 5, got 6"),
        ({"logprobs": True, "top_logprobs": -1}, 99, "top_logprobs must be at most 99, got -1"),
        ({"logprobs": True, "top_logprobs": -2}, -1, "top_logprobs must be at least 0, got -2"),
        ({"top_logprobs": 1}, 5, "top_logprobs needs logprobs=true"),
        ({"logprobs": False, "top_logprobs": 1}, 5, "top_logprobs needs logprobs=true"),
    ],
)
def test_how_many_log_probabilities_a_conversation_has(fields: dict[str, Any], bound: int, expected: Any) -> None:
    if not isinstance(expected, str):
        assert num_top_logprobs(chat(**fields), max_logprobs=bound, vocab_size=100) == expected
        return
    with pytest.raises(InvalidRequest, match=expected) as caught:
        num_top_logprobs(chat(**fields), max_logprobs=bound, vocab_size=100)
    assert caught.value.field == "top_logprobs"


USAGE = {"total_tokens": 7}


def payloads(data: bytes) -> list[Any]:
    assert data == b"" or data.endswith(b"\n\n")
    events = data.decode().split("\n\n")[:-1]
    assert all(one.startswith("data: ") for one in events)
    return [one[6:] if one == "data: [DONE]" else json.loads(one[6:]) for one in events]


def encoder(kind: Any, *, n: int = 2, **options: Any) -> Any:
    own = {"echo": options.pop("echo", None if kind is CompletionChunks else "")}
    if kind is CompletionChunks:
        own["prompt_logprobs"] = options.pop("prompt_logprobs", ())
    return kind(
        envelope={"id": "x", "model": "m"},
        options=ChunkOptions(**options),
        prompts=[[5, 6], [7]],
        n=n,
        usage=lambda: USAGE,
        **own,
    )


def delta(**fields: Any) -> SequenceDelta:
    return SequenceDelta(**{"index": 3, "text": 'a"ü', "token_ids": [1], "offset": 0} | fields)


def completion(**fields: Any) -> dict[str, Any]:
    choice = {"index": 3, "text": 'a"ü', "logprobs": None, "finish_reason": None, "stop_reason": None}
    return {"id": "x", "model": "m", "choices": [choice | fields]}


def test_chunks_of_a_completion() -> None:
    chunks = encoder(CompletionChunks)
    assert (chunks.opening(), chunks.closing()) == (b"", DONE)
    assert payloads(chunks.delta(delta())) == [completion()]
    assert chunks.delta(delta(text="")) == b""
    last = delta(finish_reason="stop", stop_reason="END", text="")
    assert payloads(chunks.delta(last)) == [completion(text="", finish_reason="stop", stop_reason="END")]


def test_chunks_of_a_completion_with_everything() -> None:
    chunks = encoder(
        CompletionChunks, include_usage=True, continuous_usage=True, return_token_ids=True, logprobs=writer(0)
    )
    news = delta(token_ids=[3], logprobs=[FIRST], token_text_offsets=[4])
    logprobs = {"text_offset": [4], "token_logprobs": [-2.0], "tokens": ["d"], "top_logprobs": [{"d": -2.0}]}
    shown = completion(logprobs=logprobs, token_ids=[3]) | {"usage": USAGE}
    first = json.loads(json.dumps(shown))
    first["choices"][0]["prompt_token_ids"] = [7]
    assert payloads(chunks.delta(news)) == [first]
    assert payloads(chunks.delta(news)) == [shown], "the prompt's ids come once"
    assert chunks.delta(delta(text="", token_ids=[])) == b""
    assert payloads(chunks.delta(delta(text="", token_ids=[4], index=1)))[0]["choices"][0]["prompt_token_ids"] == [5, 6]
    assert payloads(chunks.closing()) == [{"id": "x", "model": "m", "choices": [], "usage": USAGE}, "[DONE]"]
    plain = encoder(CompletionChunks, include_usage=True)
    assert payloads(plain.delta(delta())) == [completion() | {"usage": None}]


def echo(text: str | None, token_ids: list[int], logprobs: LogprobWriter | None = None) -> Echo:
    return Echo(text=text, token_ids=token_ids, tokenizer=LETTERS, logprobs=logprobs)


def test_an_echo_goes_before_the_first_text_of_each_sequence() -> None:
    chunks = encoder(CompletionChunks, echo=[echo("one", [1]), echo("two!", [2])], n=2)
    assert [one["choices"][0]["text"] for one in payloads(chunks.delta(delta()))] == ["two!", 'a"ü']
    assert [one["choices"][0]["text"] for one in payloads(chunks.delta(delta()))] == ['a"ü']
    assert [one["choices"][0]["text"] for one in payloads(chunks.delta(delta(index=1)))] == ["one", 'a"ü']
    with_logprobs = encoder(
        CompletionChunks,
        echo=[echo("one", [1]), echo("two!", [4, 3], writer(0))],
        n=2,
        logprobs=writer(0),
        prompt_logprobs=[[None], [None, FIRST]],
    )
    news = delta(token_ids=[3], logprobs=[FIRST], token_text_offsets=[0])
    before, after = (one["choices"][0] for one in payloads(with_logprobs.delta(news)))
    assert before["logprobs"]["tokens"] == ["e", "d"]
    assert after["logprobs"]["text_offset"] == [4], "after the prompt"


def test_an_echo_has_the_texts_of_the_prompt_and_its_lists() -> None:
    assert echo(None, [0, 1, 2]).text == "abc"
    choice: dict[str, Any] = {"text": "z", "logprobs": None}
    echo("given", [1]).put_before(choice, [None])
    assert choice == {"text": "givenz", "logprobs": None}, "no one asked for them"
    echo("given", [1], writer()).put_before(choice, None)
    assert choice["logprobs"] is None
    generated = {"text_offset": [0, 2], "tokens": ["x", "y"], "token_logprobs": [1, 2], "top_logprobs": [{}, {"a": 1}]}
    choice = {"text": "z", "logprobs": generated}
    echo("bd", [0, 1, 3], writer(0)).put_before(choice, [None, SECOND, FIRST])
    assert choice["text"] == "bdz"
    assert choice["logprobs"] == {
        "text_offset": [0, 0, 1, 2, 4],
        "tokens": ["a", "b", "d", "x", "y"],
        "token_logprobs": [None, -0.5, -2.0, 1, 2],
        "top_logprobs": [None, {"b": -0.5}, {"d": -2.0}, {}, {"a": 1}],
    }


def message(**fields: Any) -> MessageDelta:
    values = {"reasoning": "", "content": "", "tool_calls": [], "finish_reason": None, "stop_reason": None}
    more = {"token_ids": [1], "logprobs": None, "source": delta()}
    return MessageDelta(index=1, **values | more | fields)


def talk(shown: dict[str, Any], **fields: Any) -> dict[str, Any]:
    choice = {"index": 1, "delta": shown, "logprobs": None, "finish_reason": None}
    return {"id": "x", "model": "m", "choices": [choice | fields]}


def test_chunks_of_a_conversation() -> None:
    chunks = encoder(ChatChunks, echo="Once ")
    assert [one["choices"][0] for one in payloads(chunks.opening())] == [
        {
            "index": index,
            "delta": {"role": "assistant", "content": "Once "},
            "logprobs": None,
            "finish_reason": None,
        }
        for index in (0, 1)
    ]
    assert payloads(chunks.delta(message(content='a"ü'))) == [talk({"content": 'a"ü'})]
    assert chunks.delta(message()) == b""
    both = message(reasoning="hm", content="so")
    assert payloads(chunks.delta(both)) == [talk({"reasoning": "hm", "content": "so"})]
    assert payloads(chunks.delta(message(finish_reason="stop", stop_reason=5))) == [
        talk({}, finish_reason="stop", stop_reason=5)
    ]


def test_calls_of_a_chunk_are_one_entry_each() -> None:
    deltas = [
        ToolCallDelta(0, None, None, '"b"'),
        ToolCallDelta(0, None, None, "}"),
        ToolCallDelta(1, "id-1", "f", ""),
        ToolCallDelta(1, None, None, "{"),
        ToolCallDelta(2, "id-2", "g", ""),
    ]
    [shown] = payloads(encoder(ChatChunks).delta(message(tool_calls=deltas)))
    assert shown["choices"][0]["delta"]["tool_calls"] == [
        {"index": 0, "function": {"arguments": '"b"}'}},
        {"index": 1, "id": "id-1", "type": "function", "function": {"name": "f", "arguments": "{"}},
        {"index": 2, "id": "id-2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]


def test_chunks_of_a_conversation_with_everything() -> None:
    chunks = encoder(ChatChunks, include_usage=True, continuous_usage=True, return_token_ids=True, logprobs=writer(0))
    opened = payloads(chunks.opening())
    assert [one["prompt_token_ids"] for one in opened] == [[5, 6]] * 2
    assert [one["usage"] for one in opened] == [USAGE] * 2
    news = message(content="d", logprobs=[FIRST], token_ids=[3])
    logprobs = writer(0).for_chat([FIRST])
    expected = talk({"content": "d"}, logprobs=logprobs, stop_reason=None, token_ids=[3]) | {"usage": USAGE}
    assert payloads(chunks.delta(news)) == [expected]


@pytest.mark.parametrize(
    ("fields", "has_usage", "expected"),
    [
        ({}, False, (False, False, False)),
        ({}, True, (True, True, False)),
        ({"stream_options": {"include_usage": True}}, False, (True, False, False)),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, False, (True, True, False)),
        ({"stream_options": {"continuous_usage_stats": True}}, False, (False, False, False)),
        ({"stream_options": {"include_usage": False}, "return_token_ids": True}, False, (False, False, True)),
    ],
)
def test_what_chunks_carry(fields: dict[str, Any], has_usage: bool, expected: tuple[bool, ...]) -> None:
    made = chunk_options(chat(stream=True, **fields), None, has_usage=has_usage)
    assert (made.include_usage, made.continuous_usage, made.return_token_ids) == expected
    assert made.is_plain is not (made.continuous_usage or made.return_token_ids)
    assert not ChunkOptions(logprobs=writer()).is_plain
    assert event(b"x") == b"data: x\n\n"


def told(builder: BlockBuilder, **fields: Any) -> list[dict[str, Any]]:
    return list(builder.add(message(**fields)))


def test_blocks_of_an_answer_and_their_events() -> None:
    builder = BlockBuilder(id_seed="s")
    assert told(builder, reasoning="hm", content="a") == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": "", "citations": None}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "a"}},
    ]
    assert told(builder, content="b") == [
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "b"}}
    ]
    calls = [
        ToolCallDelta(0, "id", "f", ""),
        ToolCallDelta(0, None, None, '{"x"'),
        ToolCallDelta(0, None, None, ": 1}"),
    ]
    start, *deltas = told(builder, tool_calls=calls)[1:]
    assert start == {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "id": "id", "name": "f", "input": {}},
    }
    assert [one["delta"] for one in deltas] == [
        {"type": "input_json_delta", "partial_json": '{"x"'},
        {"type": "input_json_delta", "partial_json": ": 1}"},
    ]
    drawn = told(builder, tool_calls=[ToolCallDelta(1, "", "g", "")])[-1]["content_block"]["id"]
    assert drawn.startswith("toolu_")
    assert len(drawn) == 6 + 24
    assert list(builder.close()) == [{"type": "content_block_stop", "index": 3}]
    assert list(builder.close()) == []
    assert builder.blocks == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "ab", "citations": None},
        {"type": "tool_use", "id": "id", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": drawn, "name": "g", "input": {}},
    ]


@pytest.mark.parametrize(
    ("fields", "stop"),
    [
        ({"finish_reason": "stop", "content": "a"}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "END", "content": "a"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop", "stop_reason": 7, "content": "a"}, ("end_turn", None)),
        ({"finish_reason": "length", "stop_reason": "END", "content": "a"}, ("max_tokens", None)),
        (
            {"finish_reason": "tool_calls", "stop_reason": "END", "tool_calls": [ToolCallDelta(0, "i", "f", "")]},
            ("tool_use", None),
        ),
        ({"finish_reason": "length", "tool_calls": [ToolCallDelta(0, "i", "f", "")]}, ("max_tokens", None)),
    ],
)
def test_why_an_answer_of_blocks_ended(fields: dict[str, Any], stop: tuple[str, str | None]) -> None:
    builder = BlockBuilder(id_seed="s")
    told(builder, **fields)
    assert builder.stop() == {"stop_reason": stop[0], "stop_sequence": stop[1]}


def conversation(*deltas: MessageDelta, resumption: Any = None) -> Any:
    async def news() -> Any:
        for one in deltas:
            yield [one]

    noted: list[MessageDelta] = []
    run = SimpleNamespace(
        call=SimpleNamespace(engine_id="e", resumption=resumption, timeout_s=0.0),
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_output_tokens=3,
        note_place=noted.append,
        noted=noted,
    )
    return SimpleNamespace(run=run, deltas=news)


async def test_the_events_of_an_answer_of_blocks() -> None:
    usage = {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    body: dict[str, Any] = {"id": "m", "content": []}
    talk = conversation(message(content="a"), message(content="b", finish_reason="stop"))
    first, second, last = [events async for events in _events(talk, body)]
    assert first[0] == {
        "type": "message_start",
        "message": {"id": "m", "content": [], "usage": {**usage, "output_tokens": 0}},
    }
    assert [one["type"] for one in first[1:]] == ["content_block_start", "content_block_delta"]
    assert [one["delta"]["text"] for one in second] == ["b"]
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    assert last == [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ended, "usage": usage},
        {"type": "message_stop"},
    ]
    assert body == {"id": "m", "content": [{"type": "text", "text": "ab", "citations": None}], **ended, "usage": usage}
    assert len(talk.run.noted) == 2


async def test_a_client_that_comes_again_gets_what_it_has_not() -> None:
    has = message(content="a", source=delta(is_replayed=True))
    talk = conversation(has, message(content="b", finish_reason="stop"), resumption=object())
    first, second, _ = [events async for events in _events(talk, {})]
    assert first == [], "neither the start nor what it has"
    assert [one["delta"]["text"] for one in second] == ["b"]
    with pytest.raises(RequestFailed, match="the request was aborted"):
        _ = [events async for events in _events(conversation(message(finish_reason="abort")), {})]
