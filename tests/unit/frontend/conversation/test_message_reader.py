"""From sequences to messages: why they ended, what they hold, and which constraints are asked about once."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import SequenceDelta
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.conversation.dialect import Dialect
from pagoda_frontend.conversation.message import MessageCollector, MessageDelta, ToolCallDelta
from pagoda_frontend.openai import chat
from pagoda_frontend.openai.protocol import ChatBody
from pagoda_frontend.requests.grammar_checks import GrammarChecks
from pagoda_frontend.requests.structured import constraint_field
from pagoda_frontend.tool_parsers.registry import find_tool_parser
from tests.unit.frontend.parsers.test_dialect import plan, vocabulary

NAMED = {"type": "function", "function": {"name": "t0"}}
HERMES = '<tool_call>{"name": "t0", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("choice", "text", "finish_reason", "shown"),
    [
        ("auto", HERMES, "stop", "tool_calls"),
        ("auto", HERMES, "length", "length"),
        ("auto", "no call", "stop", "stop"),
        ("required", HERMES, "stop", "tool_calls"),
        (NAMED, HERMES, "stop", "stop"),
        (NAMED, HERMES, "length", "length"),
    ],
)
def test_a_stop_after_a_free_call_is_told_as_such_and_after_a_named_tool_it_is_a_stop(
    choice: Any, text: str, finish_reason: Any, shown: str
) -> None:
    dialect = Dialect(tool_parser=find_tool_parser("hermes"), can_choose=True)
    reader = dialect.reader(plan(choice, {}), prompt="", tokenizer=vocabulary(), n=1)
    message = reader.read(SequenceDelta(0, text, [1], 0, finish_reason=finish_reason))
    assert [call.name for call in message.tool_calls if call.name] == (["t0"] if text == HERMES else [])
    assert message.finish_reason == shown


def delta(content: str = "", **fields: Any) -> MessageDelta:
    values: dict[str, Any] = {"reasoning": "", "tool_calls": [], "finish_reason": None, "stop_reason": None, **fields}
    return MessageDelta(
        index=0, content=content, source=SequenceDelta(0, content, [], 0), token_ids=[], logprobs=None, **values
    )


@pytest.mark.parametrize(
    ("deltas", "content", "reasoning", "arguments"),
    [
        ([delta("a"), delta("b")], "ab", None, []),
        ([delta()], "", None, []),
        ([delta(reasoning="h"), delta(reasoning="m")], None, "hm", []),
        ([delta(reasoning="hm"), delta("a")], "a", "hm", []),
        ([delta(tool_calls=[ToolCallDelta(0, "i", "n", "")])], None, None, [""]),
        (
            [
                delta("a", tool_calls=[ToolCallDelta(0, "i", "n", ""), ToolCallDelta(0, None, None, "{")]),
                delta(tool_calls=[ToolCallDelta(0, None, None, "}"), ToolCallDelta(1, "j", "m", "")]),
            ],
            "a",
            None,
            ["{}", ""],
        ),
    ],
)
def test_a_message_has_no_content_only_where_it_has_something_else(
    deltas: list[MessageDelta], content: str | None, reasoning: str | None, arguments: list[str]
) -> None:
    collector = MessageCollector(0)
    for one in deltas:
        collector.add(one)
    message = collector.finish()
    assert (message.content, message.reasoning) == (content, reasoning)
    assert [call.arguments for call in message.tool_calls] == arguments


async def test_a_constraint_is_compiled_once_whatever_it_waits_for() -> None:
    jobs: list[bytes] = []

    async def ask(job: bytes) -> bytes:
        jobs.append(job)
        return b'{"error": null}'

    checks = GrammarChecks(tokenizer="pagoda-tiny", revision=None, vocab_size=10)
    checks.helpers = cast("Any", SimpleNamespace(ask=ask))
    for start_after in ((), (5,), (6,), ()):
        await checks.check(StructuredOutputsParams(regex="a", start_after_token_ids=start_after))
    assert len(jobs) == 1
    await checks.check(StructuredOutputsParams(regex="b"))
    assert len(jobs) == 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "tools"),
        ({"response_format": {"type": "text"}}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "structured_outputs"),
    ],
)
def test_a_fault_of_a_constraint_is_one_of_the_field_that_asks_for_it(fields: dict[str, Any], field: str) -> None:
    assert constraint_field(ChatBody.model_validate({"messages": [], **fields})) == field


@pytest.mark.parametrize(("num", "is_good"), [(0, True), (4, True), (5, False)])
def test_a_conversation_has_at_most_four_stop_strings(num: int, is_good: bool) -> None:
    body = ChatBody.model_validate({"messages": [], "stop": ["x"] * num})
    if is_good:
        chat._check_stop(body)
        return
    with pytest.raises(InvalidRequest, match="at most 4 strings, got 5") as caught:
        chat._check_stop(body)
    assert caught.value.field == "stop"
