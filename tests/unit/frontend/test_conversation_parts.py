"""Parts of a conversation, each alone: readers of messages, ids of calls, constraints of calls and of reasoning."""

import json
import re
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import ConfigError, InvalidRequest
from pagoda_common.params.outputs import HypothesisLogprobs, SequenceDelta, TokenLogprobs
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.conversation.call_ids import with_readable_ids
from pagoda_frontend.conversation.dialect import Dialect, dialect_of
from pagoda_frontend.conversation.drawn_ids import drawn_id
from pagoda_frontend.conversation.message import MessageCollector, MessageDelta, ToolCallDelta
from pagoda_frontend.conversation.message_reader import MessageParser, MessageReader
from pagoda_frontend.conversation.template import template_kwargs, token_ids_of, token_strings, trusted_chat_template
from pagoda_frontend.conversation.thinking_budget import with_thinking_budget
from pagoda_frontend.conversation.tool_constraint import constraint_of, frames_of
from pagoda_frontend.conversation.tools import ToolPlan, plan_tools
from pagoda_frontend.openai.protocol import ChatBody, ChatMessage, TokenizeBody
from pagoda_frontend.reasoning_parsers.base import ReasoningParser, TaggedReasoningParser
from pagoda_frontend.tool_parsers.base import Piece, ToolParser

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


class Tagged(TaggedReasoningParser):
    """Reasoning between R and /R."""

    markers: ClassVar = ("<R>", "</R>")
    start: ClassVar = "<R>"
    end: ClassVar = "</R>"


class TellingEmpty(Tagged):
    tells_empty: ClassVar = True


class Calls(ToolParser):
    """Every capital letter is a call of that name, all else is content."""

    markers: ClassVar = ("<C>",)

    def append(self, text: str) -> Piece:
        calls = [
            ToolCallDelta(index, f"id-{index}", letter, "")
            for index, letter in enumerate(letter for letter in text if letter.isupper())
        ]
        return Piece("", "".join(letter for letter in text if not letter.isupper()), calls)

    def finish(self) -> Piece:
        return Piece("", "!", [])

    def _advance(self, *, is_last: bool) -> bool:
        raise AssertionError("append and finish read it all")


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


class Words:
    """A tokenizer of some markers; special ones have no text."""

    def __init__(self, special: tuple[str, ...] = (), plain: tuple[str, ...] = ()) -> None:
        self._words = (*special, *plain)
        self._num_special = len(special)

    def token_id(self, token: str) -> int | None:
        return self._words.index(token) if token in self._words else None

    def decode(self, ids: list[int]) -> str:
        return "".join(self._words[one] for one in ids if one >= self._num_special)

    def token_piece(self, token_id: int) -> str:
        return f"piece-{token_id}"

    def token_text(self, token_id: int) -> str:
        return f"text-{token_id}"


def tools(*names: str, strict: bool | None = None, **parameters: Any) -> list[dict[str, Any]]:
    function = {"parameters": parameters, "strict": strict}
    return [{"type": "function", "function": {"name": name, **function}} for name in names]


def plan(given: list[dict[str, Any]] | None, choice: Any = None, **fields: Any) -> ToolPlan:
    body = ChatBody.model_validate({"messages": [], "tools": given, "tool_choice": choice, **fields})
    return plan_tools(body, can_choose=True)


NAMED = {"type": "function", "function": {"name": "a"}}


@pytest.mark.parametrize(
    ("choice", "strict", "kind", "is_constrained"),
    [
        ("auto", None, "Framed", False),
        ("auto", True, "Framed", False),
        ("required", None, "RequiredCallsParser", True),
        (NAMED, None, "NamedCallParser", True),
        ("none", None, "", False),
    ],
)
def test_which_parser_reads_calls(choice: Any, strict: bool | None, kind: str, is_constrained: bool) -> None:
    class Framed(Calls):
        """Has no frame: calls that must be made are JSON."""

    dialect = Dialect(tool_parser=Framed, can_choose=True)
    made = dialect.parser(plan(tools("a", strict=strict), choice), prompt="", id_seed="seed")
    if not kind:
        assert made is None
        return
    assert made is not None
    calls = cast("Any", made)._calls
    assert (type(calls).__name__, calls.is_constrained, calls.is_strict) == (kind, is_constrained, bool(strict))
    assert (calls.id_seed, calls.make_id) == ("seed", Framed.call_id)
    assert made.is_constrained is is_constrained


def test_a_way_of_writing_with_frames_is_taken_for_calls_that_must_be_made() -> None:
    class Framed(Calls):
        separator: ClassVar = ";"

        @classmethod
        def frame(cls, name: str) -> tuple[str, str] | None:
            return (f"<{name}>", f"</{name}>")

    asked = plan(tools("a", "b"), "required", parallel_tool_calls=False)
    assert frames_of(Framed, asked) == {"a": ("<a>", "</a>"), "b": ("<b>", "</b>")}
    assert frames_of(None, asked) is None
    assert frames_of(Calls, asked) is None
    made = Dialect(tool_parser=Framed).parser(asked, prompt="")
    assert type(cast("Any", made)._calls) is Framed
    for is_parallel in (True, False):
        asked = plan(tools("a", "b", type="object"), "required", parallel_tool_calls=is_parallel)
        constraint = constraint_of(asked, Framed)
        assert constraint is not None
        schema = {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": False}}
        tag = json.loads(cast("str", constraint.structural_tag))["format"]
        assert [(one["begin"], one["end"]) for one in tag["tags"]] == [("<a>", "</a>"), ("<b>", "</b>")]
        assert [one["content"]["type"] for one in tag["tags"]] == [schema["type"]] * 2
        assert (tag["type"], tag["separator"], tag["at_least_one"]) == ("tags_with_separator", ";", True)
        assert tag["stop_after_first"] is not is_parallel
    named = constraint_of(plan(tools("a", "b"), NAMED), Framed)
    tag = json.loads(cast("str", cast("Any", named).structural_tag))["format"]
    assert ([one["begin"] for one in tag["tags"]], tag["stop_after_first"]) == (["<a>"], True)


def test_constraints_of_calls_and_what_was_asked_besides() -> None:
    asked = StructuredOutputsParams(regex="a")
    assert constraint_of(plan(None), None, asked=asked) is asked
    assert constraint_of(plan(tools("a"), "none"), None, asked=asked) is asked
    assert constraint_of(plan(tools("a", strict=True), "auto"), Calls, asked=asked) is asked
    assert constraint_of(plan(tools("a"), "auto"), Calls) is None
    required = constraint_of(plan(tools("a"), "required"), None, asked=asked)
    assert required is not None
    assert (required.regex, required.disable_any_whitespace) == (None, True)
    assert json.loads(cast("str", required.json))["type"] == "array"
    named = constraint_of(plan(tools("a", "b", properties={"x": {"type": "string"}}), NAMED), None)
    assert named is not None
    schema = json.loads(cast("str", named.json))
    assert (schema["type"], list(schema["properties"]), schema["additionalProperties"]) == ("object", ["x"], False)


def test_special_tokens_are_needed_for_markers_of_parsers_in_use() -> None:
    both = Dialect(tool_parser=Calls, can_choose=True, reasoning_parser=Tagged)
    calls_alone = Dialect(tool_parser=Calls, can_choose=True)
    auto, none = plan(tools("a"), "auto"), plan(None)
    for special, plain, dialect, asked, needed in (
        (("<C>",), (), both, auto, True),
        (("<C>",), (), both, none, False),
        (("<R>",), (), both, none, True),
        (("</R>",), ("<R>",), both, none, True),
        ((), ("<R>", "<C>", "</R>"), both, auto, False),
        ((), (), both, auto, False),
        (("<R>",), (), calls_alone, auto, False),
        (("<C>",), (), calls_alone, plan(tools("a"), "required"), False),
    ):
        tokenizer = cast("Any", Words(special, plain))
        assert dialect.needs_special_tokens(asked, tokenizer) is needed, (special, plain)


@pytest.mark.parametrize(
    ("prompt", "template", "variables", "end"),
    [
        ("", None, None, (1,)),
        ("x<R>", None, None, (1,)),
        ("x</R>", None, None, ()),
        ("", "{{ <R> }}", None, (1,)),
        ("", "{{ </R> }}", None, (1,)),
        ("", "{{ plain }}", None, ()),
        ("x<R>", "{{ plain }}", None, (1,)),
        ("", None, {"enable_thinking": False}, ()),
        ("", None, {"thinking": False}, ()),
        ("", None, {"enable_thinking": True, "thinking": None}, (1,)),
        ("x<R>", None, {"enable_thinking": False}, (1,)),
    ],
)
def test_where_an_answer_begins(prompt: str, template: str | None, variables: Any, end: tuple[int, ...]) -> None:
    dialect, tokenizer = Dialect(reasoning_parser=Tagged), cast("Any", Words(("<R>", "</R>")))
    found = dialect.reasoning_end(prompt=prompt, tokenizer=tokenizer, template=template, variables=variables)
    assert found == end
    assert Dialect().reasoning_end(prompt=prompt, tokenizer=tokenizer) == ()
    assert dialect.reasoning_end(prompt=prompt, tokenizer=cast("Any", Words(("<R>",)))) == ()


def test_a_reader_has_a_parser_and_a_seed_for_each_message() -> None:
    dialect, tokenizer = Dialect(tool_parser=Calls, can_choose=True, reasoning_parser=Tagged), Words(("</R>",))
    made = cast("Any", dialect).reader(
        plan(tools("a"), "auto"), prompt="p", tokenizer=tokenizer, n=2, shows_reasoning=False, id_seed="s"
    )
    assert [one._calls.id_seed for one in made._parsers] == ["s/0", "s/1"]
    assert (made._shows_reasoning, made._is_named, made.counts_reasoning) == (False, False, True)
    assert (made.reasoning_end, made.needs_special_tokens) == ((0,), True)
    plain = cast("Any", Dialect()).reader(plan(None), prompt="p", tokenizer=tokenizer, n=2)
    assert (plain._parsers, plain._shows_reasoning, plain.counts_reasoning) == ([], True, False)
    named = cast("Any", Dialect()).reader(plan(tools("a"), NAMED), prompt="p", tokenizer=tokenizer, n=1)
    assert named._is_named


def test_reasoning_hears_of_calls_unless_these_split_it() -> None:
    class Splitting(Calls):
        splits_reasoning: ClassVar = True

    auto = plan(tools("a"), "auto")
    made = cast("Any", Dialect(tool_parser=Calls, reasoning_parser=Tagged).parser(auto, prompt=""))
    assert made._reasoning.call_openers == made._calls.openers
    split = cast("Any", Dialect(tool_parser=Splitting, reasoning_parser=Tagged).parser(auto, prompt=""))
    assert split._reasoning is None
    alone = cast("Any", Dialect(tool_parser=Splitting, reasoning_parser=Tagged).parser(plan(None), prompt=""))
    assert alone._reasoning is not None


def test_parsers_come_from_the_flags() -> None:
    embedded = dialect_of(FrontendConfig())
    assert embedded.tool_parser is not None
    assert (embedded.can_choose, embedded.reasoning_parser) == (True, None)
    other = dialect_of(FrontendConfig(model="other"))
    assert (other.tool_parser, other.can_choose, other.reasoning_parser) == (None, False, None)
    named = dialect_of(FrontendConfig(tool_call_parser="mistral", reasoning_parser="qwen3"))
    assert named.tool_parser is not None
    assert named.tool_parser is not embedded.tool_parser
    assert (named.can_choose, named.reasoning_parser is not None) == (False, True)
    chosen = FrontendConfig(model="other", tool_call_parser="mistral", enable_auto_tool_choice=True)
    assert dialect_of(chosen).can_choose
    for field in ("tool_call_parser", "reasoning_parser", "tool_parser_plugin", "reasoning_parser_plugin"):
        with pytest.raises(ConfigError):
            dialect_of(FrontendConfig(**cast("Any", {field: "/no/such.py"})))


def budget(
    number: int | None,
    constraint: StructuredOutputsParams | None = None,
    *,
    prompt: str = "<R>",
    words: tuple[str, ...] = ("<R>", "</R>"),
    dialect: Dialect | None = None,
    **more: Any,
) -> StructuredOutputsParams | None:
    return with_thinking_budget(
        constraint,
        number,
        dialect=dialect or Dialect(reasoning_parser=Tagged),
        prompt=prompt,
        tokenizer=cast("Any", Words(words)),
        max_model_len=100,
        **more,
    )


@pytest.mark.parametrize(
    ("number", "prompt", "words", "grammar"),
    [
        (3, "<R>", ("<R>", "</R>"), "start: <[0]>? <[^1]>{0,3} <[1]> rest\nrest: <[*]>*"),
        (0, "<R>", ("<R>", "</R>"), "start: <[0]>?  <[1]> rest\nrest: <[*]>*"),
        (99, "<R>", ("</R>",), "start:  <[^0]>{0,99} <[0]> rest\nrest: <[*]>*"),
        (3, "", ("<R>", "</R>"), "start: plain (<[0]> <[^1]>{0,3} <[1]> plain)*\nplain: <[^0]>*"),
        (0, "", ("<R>", "</R>"), "start: plain (<[0]>  <[1]> plain)*\nplain: <[^0]>*"),
    ],
)
def test_a_budget_is_this_grammar(number: int, prompt: str, words: tuple[str, ...], grammar: str) -> None:
    assert budget(number, prompt=prompt, words=words) == StructuredOutputsParams(grammar=grammar)


def test_a_budget_that_means_nothing_changes_nothing() -> None:
    asked = StructuredOutputsParams(regex="a")
    for number, prompt in ((None, "<R>"), (-1, "<R>"), (100, "<R>"), (3, "</R>")):
        assert budget(number, prompt=prompt) is None
        assert budget(number, asked, prompt=prompt) is asked
    assert budget(3, asked) is asked, "the constraint does not wait for reasoning"


@pytest.mark.parametrize(
    ("number", "words", "prompt"), [(3, ("<R>",), "<R>"), (3, ("</R>",), ""), (3, (), "<R>"), (-2, ("<R>", "</R>"), "")]
)
def test_a_budget_that_cannot_be_held_is_refused_or_forgotten(number: int, words: tuple[str, ...], prompt: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        budget(number, words=words, prompt=prompt)
    assert caught.value.field == "thinking_token_budget"
    if number >= 0:
        assert budget(number, words=words, prompt=prompt, is_wish=True) is None
        assert budget(number, dialect=Dialect(), is_wish=True) is None
    assert budget(3, is_wish=True) is not None


@pytest.mark.parametrize(
    ("given", "format_"),
    [
        ({"json": {"type": "integer"}}, {"type": "json_schema", "json_schema": {"type": "integer"}}),
        ({"json_object": True}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        (
            {"choice": ["a", "b"]},
            {"type": "or", "elements": [{"type": "const_string", "value": one} for one in "ab"]},
        ),
        ({"grammar": "start: x"}, {"type": "grammar", "grammar": "start: x"}),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"type": "any_text"},
        ),
    ],
)
def test_a_budget_goes_before_what_the_answer_must_be(given: dict[str, Any], format_: dict[str, Any]) -> None:
    asked = StructuredOutputsParams(**given, start_after_token_ids=(1,), disable_any_whitespace=True)
    made = budget(3, asked)
    assert made is not None
    assert (made.start_after_token_ids, made.disable_any_whitespace, made.kind) == ((), True, "structural_tag")
    tag = json.loads(cast("str", made.structural_tag))
    reasoning = {"type": "grammar", "grammar": "start: <[0]>? <[^1]>{0,3} <[1]>"}
    assert tag == {"type": "structural_tag", "format": {"type": "sequence", "elements": [reasoning, format_]}}


def test_a_budget_goes_with_no_tag_of_the_older_shape() -> None:
    older = StructuredOutputsParams(structural_tag={"structures": [], "triggers": []}, start_after_token_ids=(1,))
    with pytest.raises(InvalidRequest, match="goes with structural tags that have a format only") as caught:
        budget(3, older)
    assert caught.value.field == "thinking_token_budget"


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
