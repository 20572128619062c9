"""Tools of a conversation: which choice becomes which plan, which constraint holds, and each fault by its place."""

from typing import Any

import orjson
import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import HypothesisLogprobs, SequenceDelta, TokenLogprobs
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.conversation.message import (
    CollectedMessage,
    MessageCollector,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)
from pagoda_frontend.conversation.template import template_kwargs
from pagoda_frontend.conversation.tool_constraint import constraint_of
from pagoda_frontend.conversation.tools import ToolPlan, plan_tools
from pagoda_frontend.openai.protocol import ChatBody

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def body_of(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


def plan_of(can_choose: bool = True, **fields: Any) -> ToolPlan:
    return plan_tools(body_of(**fields), can_choose=can_choose)


F, G = tool("f", SCHEMA), tool("g")


@pytest.mark.parametrize(
    ("fields", "names", "choice", "name", "is_parallel"),
    [
        ({}, [], "none", "", True),
        ({"tool_choice": "none"}, [], "none", "", True),
        ({"tools": [F, G], "tool_choice": "none"}, [], "none", "", True),
        ({"tools": [F, G]}, ["f", "g"], "auto", "", True),
        ({"tools": [F, G], "tool_choice": "auto", "parallel_tool_calls": False}, ["f", "g"], "auto", "", False),
        ({"tools": [F, G], "tool_choice": "required"}, ["f", "g"], "required", "", True),
        (
            {"tools": [F, G], "tool_choice": "required", "parallel_tool_calls": False},
            ["f", "g"],
            "required",
            "",
            False,
        ),
        ({"tools": [F, G], "tool_choice": named("g")}, ["f", "g"], "named", "g", True),
        ({"tools": [F, G], "tool_choice": named("g"), "parallel_tool_calls": False}, ["f", "g"], "named", "g", False),
        ({"tools": [F, G], "tool_choice": allowed("required", "g", "g")}, ["g"], "required", "", True),
        ({"tools": [F, G], "tool_choice": allowed("auto", "g", "f")}, ["g", "f"], "auto", "", True),
        ({"functions": None, "function_call": "none"}, [], "none", "", True),
    ],
)
def test_a_choice_is_this_plan(fields: Any, names: list[str], choice: str, name: str, is_parallel: bool) -> None:
    plan = plan_of(**fields)
    assert [one.function.name for one in plan.tools] == names
    assert (plan.choice, plan.name, plan.is_parallel) == (choice, name, is_parallel)
    if choice == "auto":
        with pytest.raises(InvalidRequest) as caught:
            plan_of(can_choose=False, **fields)
        assert caught.value.field == "tool_choice"
    else:
        assert plan_of(can_choose=False, **fields).choice == choice


PARAMETERS = "tools.0.function.parameters"


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"functions": []}, "functions", "functions is deprecated and not supported: use tools"),
        ({"function_call": "auto"}, "function_call", "function_call is deprecated and not supported: use tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": []}, "tools", "tools must not be empty: leave it out, or give at least one tool"),
        ({"tools": [F, F]}, "tools", "tools.1.function.name: there are two tools called 'f'"),
        (
            {"tools": [F, G], "tool_choice": named("h")},
            "tool_choice",
            "tool_choice names 'h', must be one of the tools: f, g",
        ),
        (
            {"tools": [F], "tool_choice": allowed("auto")},
            "tool_choice",
            "tool_choice.allowed_tools.tools must not be empty",
        ),
        ({"tools": [tool("f", {"type": "array"})]}, "tools", f"{PARAMETERS}.type must be 'object', got 'array'"),
        ({"tools": [tool("f", {"required": "a"})]}, "tools", f"{PARAMETERS}.required must be a list of names, got 'a'"),
        ({"tools": [tool("f", {"required": [1]})]}, "tools", f"{PARAMETERS}.required must be a list of names, got [1]"),
        ({"tools": [tool("f", {"enum": 1})]}, "tools", f"{PARAMETERS}.enum must be a list, got 1"),
        ({"tools": [tool("f", {"properties": []})]}, "tools", f"{PARAMETERS}.properties must be an object, got []"),
        ({"tools": [tool("f", {"$defs": 1})]}, "tools", f"{PARAMETERS}.$defs must be an object, got 1"),
        ({"tools": [tool("f", {"definitions": 1})]}, "tools", f"{PARAMETERS}.definitions must be an object, got 1"),
        ({"tools": [tool("f", {"anyOf": 1})]}, "tools", f"{PARAMETERS}.anyOf must be a list of schemas, got 1"),
        ({"tools": [tool("f", {"oneOf": [1]})]}, "tools", f"{PARAMETERS}.oneOf.0 must be a JSON schema, got 1"),
        ({"tools": [tool("f", {"allOf": [True, 1]})]}, "tools", f"{PARAMETERS}.allOf.1 must be a JSON schema, got 1"),
        ({"tools": [tool("f", {"items": 1})]}, "tools", f"{PARAMETERS}.items must be a JSON schema, got 1"),
        (
            {"tools": [tool("f", {"properties": {"a": {"type": ["string", "text"]}}})]},
            "tools",
            f"{PARAMETERS}.properties.a.type 'text' is not a type of JSON schema",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_named(fields: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_of(**fields)
    assert (caught.value.field, caught.value.message) == (field, message)


@pytest.mark.parametrize(
    ("name", "is_good"),
    [
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("aZ0_.-", True),
        ("a b", False),
        ("é", False),
        ("a\n", False),
    ],
)
def test_names_of_tools(name: str, is_good: bool) -> None:
    if is_good:
        assert plan_of(tools=[tool(name)]).tools[0].function.name == name
        return
    with pytest.raises(InvalidRequest, match=r"tools\.0\.function\.name must be 1 to 128"):
        plan_of(tools=[tool(name)])


def test_schemas_of_tools() -> None:
    plan = plan_of(tools=[F, G, tool("h", {"properties": {}}, strict=True)])
    assert plan.schemas == {
        "f": SCHEMA,
        "g": {"type": "object", "properties": {}},
        "h": {"type": "object", "properties": {}},
    }
    assert plan.has_strict_tools
    assert not plan_of(tools=[F, tool("g", strict=False)]).has_strict_tools
    closed = plan.closed_schemas()
    assert (closed["f"], closed["g"]) == ({"type": "object"}, {"type": "object"}), "free, and not strict"
    assert closed["h"]["additionalProperties"] is False
    assert plan_of(tools=[F, G], tool_choice=named("f")).closed_schemas() == {"f": CLOSED}
    both = {"type": "object", "allOf": [SCHEMA]}
    required = plan_of(tools=[F, tool("g", both)], tool_choice="required").closed_schemas()
    assert required == {"f": CLOSED, "g": both}


def test_constraints_of_calls_where_the_models_way_of_writing_is_not_known() -> None:
    asked = StructuredOutputsParams(regex="a")
    assert constraint_of(plan_of(), None) is None
    assert constraint_of(plan_of(), None, asked=asked) is asked
    assert constraint_of(plan_of(tools=[F]), None, asked=asked) is asked
    assert constraint_of(plan_of(tools=[tool("f", strict=True)]), None) is None
    by_name = constraint_of(plan_of(tools=[F], tool_choice=named("f")), None, asked=asked)
    assert by_name is not None
    assert isinstance(by_name.json, str)
    assert orjson.loads(by_name.json) == CLOSED
    assert (by_name.disable_any_whitespace, by_name.regex) == (True, None)
    required = constraint_of(plan_of(tools=[F], tool_choice="required"), None)
    one = constraint_of(plan_of(tools=[F], tool_choice="required", parallel_tool_calls=False), None)
    assert required is not None
    assert one is not None
    assert isinstance(required.json, str)
    assert isinstance(one.json, str)
    several, single = orjson.loads(required.json), orjson.loads(one.json)
    assert (several["type"], several["minItems"]) == ("array", 1)
    assert "maxItems" not in several
    assert single == {**several, "maxItems": 1}


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"reasoning_effort": "x", "enable_thinking": True}},
            {"reasoning_effort": "x", "enable_thinking": True},
        ),
    ],
)
def test_variables_of_the_template(fields: Any, kwargs: dict[str, Any]) -> None:
    assert template_kwargs(body_of(**fields)) == kwargs


def test_a_message_is_put_together_of_its_deltas() -> None:
    collector = MessageCollector(3)
    position = TokenLogprobs(token_ids=[5], logprobs=[-1.0], sampled_rank=1)
    hypothesis = HypothesisLogprobs(cumulative_logprob=-2.0, logprobs=[-2.0], ranks=[1])

    def delta(**fields: Any) -> MessageDelta:
        source = SequenceDelta(
            index=3, text="", token_ids=[], offset=0, num_output_tokens=0, hypothesis=fields.pop("hypothesis", None)
        )
        whole: dict[str, Any] = {"reasoning": "", "content": "", "tool_calls": []}
        whole |= {"finish_reason": None, "stop_reason": None}
        return MessageDelta(index=3, source=source, **{**whole, "token_ids": [], "logprobs": None, **fields})

    for one in (
        delta(reasoning="I ", token_ids=[1], logprobs=[position]),
        delta(reasoning="see", content="Yes", token_ids=[2, 3]),
        delta(tool_calls=[ToolCallDelta(0, "c", "f", ""), ToolCallDelta(0, None, None, "{")]),
        delta(tool_calls=[ToolCallDelta(0, None, None, "}"), ToolCallDelta(1, None, None, "[]")], logprobs=[position]),
        delta(content="!", finish_reason="tool_calls", stop_reason="END", hypothesis=hypothesis),
    ):
        collector.add(one)
    assert collector.finish() == CollectedMessage(
        index=3,
        reasoning="I see",
        content="Yes!",
        tool_calls=[ToolCall("c", "f", "{}"), ToolCall("", "", "[]")],
        finish_reason="tool_calls",
        stop_reason="END",
        token_ids=[1, 2, 3],
        logprobs=[position, position],
        hypothesis=hypothesis,
    )
