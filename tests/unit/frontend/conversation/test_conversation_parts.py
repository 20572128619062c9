"""Parts of a conversation, each alone: readers of messages, ids of calls, templates, bodies to tokenize."""

import re
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import HypothesisLogprobs, SequenceDelta, TokenLogprobs
from pagoda_frontend.conversation.call_ids import with_readable_ids
from pagoda_frontend.conversation.drawn_ids import drawn_id
from pagoda_frontend.conversation.message import MessageCollector, MessageDelta, ToolCallDelta
from pagoda_frontend.conversation.message_reader import MessageParser, MessageReader
from pagoda_frontend.conversation.template import template_kwargs, token_ids_of, token_strings, trusted_chat_template
from pagoda_frontend.openai.protocol import ChatBody, ChatMessage, TokenizeBody
from pagoda_frontend.reasoning_parsers.base import ReasoningParser
from pagoda_frontend.tool_parsers.base import ToolParser
from tests.unit.frontend.conversation.small_parsers import Calls, Tagged, Words

SEQUENCE = SequenceDelta(
    index=1,
    text="text",
    token_ids=[5, 6],
    offset=3,
    logprobs=[TokenLogprobs([5], [-1.0], 1), TokenLogprobs([6], [-2.0], 2)],
    finish_reason="stop",
    stop_reason="END",
    num_output_tokens=5,
    is_replayed=True,
)


class TellingEmpty(Tagged):
    tells_empty: ClassVar = True


def reader(*parsers: MessageParser, **changes: Any) -> MessageReader:
    given: dict[str, Any] = {
        "is_named": False,
        "shows_reasoning": True,
        "counts_reasoning": True,
        "reasoning_end": (9,),
        "needs_special_tokens": False,
    }
    return MessageReader(parsers=parsers, **given | changes)


def parser(
    *, reasoning: type[ReasoningParser] | None = Tagged, calls: ToolParser | None = None, is_parallel: bool = True
) -> MessageParser:
    made = None if reasoning is None else reasoning(prompt="")
    return MessageParser(reasoning=made, calls=calls, is_parallel=is_parallel)


def calls_parser(**fields: Any) -> Calls:
    made = Calls(schemas={})
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_message_without_parsers_is_the_sequence_itself() -> None:
    delta = reader().read(SEQUENCE)
    assert (delta.index, delta.reasoning, delta.content, delta.tool_calls) == (1, "", "text", [])
    assert (delta.source, delta.finish_reason, delta.stop_reason) == (SEQUENCE, "stop", "END")
    assert (delta.token_ids, delta.logprobs) == ([5, 6], SEQUENCE.logprobs)
    assert (delta.is_reasoning_told, delta.is_called_by_name) == (False, False)
    assert (delta.num_output_tokens, delta.is_replayed, delta.is_empty) == (5, True, False)


def test_a_message_with_parsers_keeps_what_the_sequence_says() -> None:
    delta = reader(parser(), parser()).read(SEQUENCE)
    assert (delta.index, delta.content, delta.source) == (1, "text", SEQUENCE)
    assert (delta.finish_reason, delta.stop_reason, delta.token_ids) == ("stop", "END", [5, 6])
    assert delta.logprobs == SEQUENCE.logprobs


def test_each_message_has_a_parser_of_its_own() -> None:
    both = reader(parser(), parser())
    assert both.read(SequenceDelta(0, "<R>a", [1], 0)).reasoning == "a"
    assert both.read(SequenceDelta(1, "b", [1], 0)).content == "b"
    assert both.read(SequenceDelta(0, "c</R>d", [1], 1)).content == "d"


@pytest.mark.parametrize(("shows", "reasoning"), [(True, "a"), (False, "")])
def test_reasoning_is_shown_or_dropped_and_always_read(shows: bool, reasoning: str) -> None:
    one = reader(parser(), shows_reasoning=shows)
    assert one.read(SequenceDelta(0, "<R>a", [1, 2], 0)).reasoning == reasoning
    last = one.read(SequenceDelta(0, "</R>b", [9, 4], 2, finish_reason="stop"))
    assert (last.reasoning, last.content) == ("", "b")


def test_reasoning_tokens_are_counted_up_to_the_end_of_it() -> None:
    one = reader(parser(), parser())
    one.read(SequenceDelta(0, "<R>", [1], 0))
    assert one.num_reasoning_tokens == 0, "it was not known yet"
    one.read(SequenceDelta(0, "a", [2, 3], 1))
    one.read(SequenceDelta(0, "b</R>c", [4, 9, 5, 6], 3))
    one.read(SequenceDelta(0, "d", [7], 7))
    assert one.num_reasoning_tokens == 4
    one.read(SequenceDelta(1, "<R>x", [1], 0))
    one.read(SequenceDelta(1, "y", [2], 1))
    assert one.num_reasoning_tokens == 5, "of all messages"
    endless = reader(parser(), reasoning_end=())
    endless.read(SequenceDelta(0, "<R>", [1], 0))
    endless.read(SequenceDelta(0, "b</R>c", [4, 9, 5, 6], 3))
    assert endless.num_reasoning_tokens == 4


def test_what_was_held_back_comes_with_the_end() -> None:
    one = reader(parser(calls=calls_parser()))
    assert one.read(SequenceDelta(0, "<", [1], 0)).is_empty
    last = one.read(SequenceDelta(0, "a", [2], 1, finish_reason="stop"))
    assert (last.content, last.reasoning) == ("<a!", "")


@pytest.mark.parametrize(
    ("told", "shows", "is_told"), [(TellingEmpty, True, True), (TellingEmpty, False, False), (Tagged, True, False)]
)
def test_empty_reasoning_is_told_in_the_last_delta_alone(
    told: type[ReasoningParser], shows: bool, is_told: bool
) -> None:
    one = reader(parser(reasoning=told), shows_reasoning=shows)
    assert not one.read(SequenceDelta(0, "<R></R>", [1, 9], 0)).is_reasoning_told
    assert one.read(SequenceDelta(0, "a", [2], 2, finish_reason="stop")).is_reasoning_told is is_told


def test_one_call_or_several() -> None:
    for is_parallel, names in ((True, ["A", "B"]), (False, ["A"])):
        one = reader(parser(reasoning=None, calls=calls_parser(), is_parallel=is_parallel))
        delta = one.read(SequenceDelta(0, "xAyB", [1], 0))
        assert ([call.name for call in delta.tool_calls], delta.content) == (names, "xy")
        assert not delta.is_called_by_name


@pytest.mark.parametrize(
    ("is_constrained", "text", "reason", "content"),
    [
        (True, "beg", "length", ""),
        (True, "beg", "stop", "beg!"),
        (False, "beg", "length", "beg!"),
        (True, "Abeg", "length", "beg!"),
    ],
)
def test_the_beginning_of_a_call_that_was_cut_off_is_no_content(
    is_constrained: bool, text: str, reason: Any, content: str
) -> None:
    calls = calls_parser(is_constrained=is_constrained)
    one = reader(parser(reasoning=None, calls=calls), is_named=True)
    delta = one.read(SequenceDelta(0, text, [1], 0, finish_reason=reason))
    assert (delta.content, delta.finish_reason, delta.is_called_by_name) == (content, reason, True)


def test_a_collected_message_has_everything() -> None:
    collector = MessageCollector(2)
    hypothesis = HypothesisLogprobs(-1.0, [-1.0], [1])
    source = SequenceDelta(2, "", [], 0, hypothesis=hypothesis)

    def delta(**fields: Any) -> MessageDelta:
        values = {"reasoning": "", "content": "", "tool_calls": [], "finish_reason": None, "stop_reason": None}
        more = {"token_ids": [1], "logprobs": [TokenLogprobs([1], [-1.0], 1)], "source": source}
        return MessageDelta(index=2, **values | more | fields)

    collector.add(delta(reasoning="hm"))
    collector.add(delta(tool_calls=[ToolCallDelta(0, "i", "n", ""), ToolCallDelta(0, None, None, "{}")]))
    collector.add(delta(finish_reason="tool_calls", stop_reason=7, is_called_by_name=True, logprobs=None))
    message = collector.finish()
    assert (message.index, message.reasoning, message.content) == (2, "hm", ""), "the client has named the tool"
    assert [(call.id, call.name, call.arguments) for call in message.tool_calls] == [("i", "n", "{}")]
    assert (message.finish_reason, message.stop_reason, message.token_ids) == ("tool_calls", 7, [1, 1, 1])
    assert (len(message.logprobs), message.hypothesis) == (2, hypothesis)
    told = MessageCollector(0)
    told.add(delta(is_reasoning_told=True, content="a"))
    assert (told.finish().reasoning, told.finish().content) == ("", "a")


class NineLetters(Calls):
    id_pattern: ClassVar = re.compile("[a-z0-9]{9}")

    @classmethod
    def call_id(cls, name: str, index: int, seed: str) -> str:
        return f"{name}{index}{seed[:8]}"


def test_ids_that_a_template_would_refuse_are_replaced_alike() -> None:
    messages = [
        ChatMessage.model_validate(
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                    {"id": "abcdefghi", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                    {"type": "function", "function": {"name": "h", "arguments": "{}"}},
                ],
            }
        ),
        ChatMessage.model_validate({"role": "tool", "tool_call_id": "call_1", "content": "1"}),
        ChatMessage.model_validate({"role": "tool", "tool_call_id": "abcdefghi", "content": "2"}),
        ChatMessage.model_validate({"role": "user", "content": "hi"}),
    ]
    assert with_readable_ids(messages, None) is messages
    assert with_readable_ids(messages, Calls) is messages, "it takes any id"
    assistant, first, second, user = with_readable_ids(messages, NineLetters)
    assert assistant.tool_calls is not None
    made, kept, none = (call.id for call in assistant.tool_calls)
    assert (kept, none) == ("abcdefghi", None)
    assert made == first.tool_call_id != "call_1"
    assert re.fullmatch("0[0-9a-f]{8}", made or "")
    assert (second.tool_call_id, user) == ("abcdefghi", messages[3])
    assert messages[1].tool_call_id == "call_1", "what was given stays"
    assert [call.function.name for call in assistant.tool_calls] == ["f", "g", "h"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "a": 1}},
            {"reasoning_effort": "none", "enable_thinking": True, "a": 1},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_variables_of_the_template_come_from_the_body(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    body = ChatBody.model_validate({"messages": [], **fields})
    assert template_kwargs(body) == expected
    assert body.chat_template_kwargs == fields.get("chat_template_kwargs")


def test_a_template_comes_with_a_request_where_that_is_allowed() -> None:
    def serving(trusts: bool) -> Any:
        return SimpleNamespace(config=SimpleNamespace(trust_request_chat_template=trusts))

    assert trusted_chat_template(None, serving=serving(False)) is None
    assert trusted_chat_template("{{ x }}", serving=serving(True)) == "{{ x }}"
    for given in ("{{ x }}", ""):
        with pytest.raises(InvalidRequest, match="--trust-request-chat-template") as caught:
            trusted_chat_template(given, serving=serving(False))
        assert caught.value.field == "chat_template"


class Prompts:
    """Notes how a text or a conversation is to be tokenized."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def from_text(self, text: str, **options: Any) -> list[int]:
        self.calls.append((text, options))
        return [1]

    async def from_messages(self, messages: Any, **options: Any) -> list[int]:
        self.calls.append(([message.content for message in messages], options))
        return [2]


async def test_a_body_to_tokenize_is_a_text_or_a_conversation() -> None:
    prompts = Prompts()
    model: Any = SimpleNamespace(prompts=prompts)
    serving: Any = SimpleNamespace(config=SimpleNamespace(trust_request_chat_template=True))

    async def ids(**fields: Any) -> list[int]:
        return await token_ids_of(TokenizeBody.model_validate(fields), model=model, serving=serving)

    assert await ids(prompt="a") == await ids(prompt="", add_special_tokens=False) == [1]
    counted = {"field": "prompt", "is_counted": True}
    assert prompts.calls == [
        ("a", {"add_special_tokens": True, **counted}),
        ("", {"add_special_tokens": False, **counted}),
    ]
    prompts.calls.clear()
    messages = [{"role": "user", "content": "hi"}]
    assert await ids(messages=messages) == [2]
    more = {"chat_template": "t", "chat_template_kwargs": {"a": 1}, "continue_final_message": True}
    assert await ids(messages=messages, add_generation_prompt=False, add_special_tokens=True, **more) == [2]
    plain = {"chat_template": None, "chat_template_kwargs": None, "continue_final_message": False}
    common = {"tools": None, "is_counted": True}
    assert prompts.calls == [
        (["hi"], {"add_generation_prompt": True, "add_special_tokens": False, **plain, **common}),
        (["hi"], {"add_generation_prompt": False, "add_special_tokens": True, **more, **common}),
    ]
    for fields in ({}, {"prompt": "a", "messages": messages}):
        with pytest.raises(InvalidRequest, match="exactly one of prompt and messages must be given") as caught:
            await ids(**fields)
        assert caught.value.field == "prompt"


def test_tokens_of_a_text_are_pieces_and_those_of_a_conversation_texts() -> None:
    tokenizer = cast("Any", Words())
    text, talk = TokenizeBody(prompt="a"), TokenizeBody.model_validate({"messages": []})
    assert token_strings([3, 4], text, tokenizer=tokenizer) == ["piece-3", "piece-4"]
    assert token_strings([3, 4], talk, tokenizer=tokenizer) == ["text-3", "text-4"]


def test_ids_are_drawn_from_a_seed_or_by_chance() -> None:
    assert drawn_id("s", "a") == drawn_id("s", "a") != drawn_id("s", "b") != drawn_id("t", "b")
    assert (len(drawn_id("s", "a")), len(drawn_id("", "a"))) == (64, 32)
    assert drawn_id("", "a") != drawn_id("", "a")
