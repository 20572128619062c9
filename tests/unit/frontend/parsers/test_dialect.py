"""Which parsers read a model's text, and what of it they need."""

import json
import re
from collections.abc import Sequence
from typing import Any, cast

import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import ConfigError, InvalidRequest
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.conversation.call_ids import with_readable_ids
from pagoda_frontend.conversation.dialect import Dialect, dialect_of
from pagoda_frontend.conversation.tool_constraint import constraint_of
from pagoda_frontend.conversation.tools import ToolPlan, plan_tools
from pagoda_frontend.openai.protocol import ChatBody
from pagoda_frontend.tool_parsers.registry import find_tool_parser


class Vocabulary:
    """A tokenizer of a few special and plain tokens."""

    def __init__(self, *, special: Sequence[str] = (), plain: Sequence[str] = ()) -> None:
        self._texts = [*special, *plain]
        self._num_special = len(special)

    def token_id(self, token: str) -> int | None:
        return self._texts.index(token) if token in self._texts else None

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[token_id] for token_id in token_ids if token_id >= self._num_special)


def vocabulary(**kwargs: Sequence[str]) -> Tokenizer:
    return cast("Tokenizer", Vocabulary(**kwargs))


def plan(choice: Any = None, *schemas: dict[str, Any]) -> ToolPlan:
    tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": one}} for i, one in enumerate(schemas)]
    body = ChatBody.model_validate({"messages": [], "tools": tools or None, "tool_choice": choice})
    return plan_tools(body, can_choose=True)


def dialect(**config: Any) -> Dialect:
    return dialect_of(FrontendConfig(model="other", **config))


def test_the_embedded_model_writes_hermes_and_others_are_unknown() -> None:
    assert dialect_of(FrontendConfig()).can_choose
    assert dialect() == Dialect()
    with pytest.raises(ConfigError, match="tool_call_parser"):
        FrontendConfig(enable_auto_tool_choice=True)


def test_special_tokens_are_kept_where_a_marker_is_one() -> None:
    mistral = dialect(tool_call_parser="mistral", enable_auto_tool_choice=True)
    free = plan(None, {})
    assert mistral.needs_special_tokens(free, vocabulary(special=["[TOOL_CALLS]"]))
    assert not mistral.needs_special_tokens(free, vocabulary(plain=["[TOOL_CALLS]"]))
    assert not mistral.needs_special_tokens(plan(), vocabulary(special=["[TOOL_CALLS]"]))
    assert not mistral.needs_special_tokens(plan("required", {}), vocabulary(special=["[TOOL_CALLS]"]))
    thinking = dialect(reasoning_parser="deepseek_r1")
    assert thinking.needs_special_tokens(plan(), vocabulary(special=["</think>"]))


def test_a_constraint_waits_for_the_end_of_the_reasoning_where_it_can_be_seen() -> None:
    thinking = dialect(reasoning_parser="qwen3")
    one = vocabulary(plain=["<think>", "</think>"])
    assert thinking.reasoning_end(prompt="…<think>\n", tokenizer=one) == (1,)
    assert thinking.reasoning_end(prompt="…<think>\n\n</think>\n\n", tokenizer=one) == ()
    assert thinking.reasoning_end(prompt="…<think>\n", tokenizer=vocabulary()) == ()
    assert dialect().reasoning_end(prompt="", tokenizer=one) == ()


@pytest.mark.parametrize(
    ("parser", "prompt", "template", "variables", "waits"),
    [
        ("qwen3", "hi", "<think>", {}, True),
        ("qwen3", "hi", "<think>", {"enable_thinking": True}, True),
        ("qwen3", "hi", "<think>", {"enable_thinking": False}, False),
        ("qwen3", "hi", "<think>", {"thinking": False}, False),
        ("qwen3", "hi", "{{ messages }}", {}, False),
        ("qwen3", "hi", None, {}, True),
        ("qwen3", "hi<think>\n", "{{ messages }}", {}, True),
        ("qwen3", "hi<think>\n", "<think>", {"enable_thinking": False}, True),
        ("qwen3", "hi<think>\n\n</think>\n\n", "<think>", {}, False),
        ("deepseek_r1", "hi", "{{ messages }}", {}, True),
        ("deepseek_r1", "hi", "<think>", {"enable_thinking": False}, True),
        ("deepseek_r1", "hi</think>", "<think>", {}, False),
    ],
)
def test_a_constraint_begins_at_once_where_the_model_does_not_think(
    parser: str, prompt: str, template: str | None, variables: dict[str, Any], waits: bool
) -> None:
    one = vocabulary(plain=["<think>", "</think>"])
    end = dialect(reasoning_parser=parser).reasoning_end(
        prompt=prompt, tokenizer=one, template=template, variables=variables
    )
    assert end == ((1,) if waits else ())


def test_schemas_that_refer_to_themselves_are_led_to_where_they_are_now() -> None:
    tree = {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/Leaf"}},
        "$defs": {"Leaf": {"type": "string"}},
    }
    constraint = constraint_of(plan("required", tree, {}), None)
    assert constraint is not None
    schema = json.loads(str(constraint.json))
    moved = schema["$defs"]["tool0"]
    assert moved["properties"] == {"child": {"$ref": "#/$defs/tool0"}, "leaf": {"$ref": "#/$defs/tool0/$defs/Leaf"}}
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["t0", "t1"]


def test_a_schema_that_is_too_large_is_a_fault_of_the_tools() -> None:
    large = {"type": "object", "properties": {f"property {number}": {"type": "string"} for number in range(20_000)}}
    with pytest.raises(InvalidRequest, match="bytes") as caught:
        constraint_of(plan("required", large), None)
    assert caught.value.field == "tools"


def test_a_call_ends_reasoning_that_is_never_closed() -> None:
    thinking = dialect(reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True)
    parser = thinking.parser(plan(None, {}), prompt="<think>\n")
    assert parser is not None
    piece = parser.append('Hm.\n<tool_call>{"name": "t0", "arguments": {}}</tool_call>', is_last=True)
    assert (piece.reasoning, piece.content, [call.name for call in piece.tool_calls]) == ("Hm.\n", "", ["t0", None])


def test_ids_are_as_the_models_template_wants_them_however_a_call_is_made() -> None:
    for choice in (None, "required", {"type": "function", "function": {"name": "t0"}}):
        for name, pattern in (("mistral", "[A-Za-z0-9]{9}"), ("kimi_k2", "functions.t0:0"), ("hermes", "call_.{24}")):
            parser = dialect(tool_call_parser=name, enable_auto_tool_choice=True).parser(plan(choice, {}), prompt="")
            assert parser is not None
            text = {None: '[TOOL_CALLS]t0{}<tool_call>{"name": "t0"}', "required": '[{"name": "t0", "parameters": {}}]'}
            text[None] += "<|tool_call_begin|>functions.t0:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            written = text.get(choice, "{}") if not isinstance(choice, dict) else "{}"
            if name == "hermes" and choice is not None:
                written = '<tool_call>\n{"name": "t0", "arguments": {}}\n</tool_call>'
            [call, *_] = parser.append(written, is_last=True).tool_calls
            assert re.fullmatch(pattern, call.id or ""), (choice, name)


def test_ids_of_other_models_fit_mistrals_template() -> None:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "t0", "arguments": "{}"}}
    own = {**call, "id": "abcDEF789"}
    history = [
        {"role": "assistant", "tool_calls": [call, own]},
        *({"role": "tool", "tool_call_id": made["id"], "content": "5"} for made in (call, own)),
    ]
    messages = ChatBody.model_validate({"messages": history}).messages
    asked, *answers = with_readable_ids(messages, find_tool_parser("mistral"))
    ids = [made.id for made in asked.tool_calls or ()]
    assert [answer.tool_call_id for answer in answers] == ids
    assert ids[1] == "abcDEF789"
    assert re.fullmatch("[A-Za-z0-9]{9}", ids[0] or "")
    assert with_readable_ids(messages, find_tool_parser("hermes")) is messages
