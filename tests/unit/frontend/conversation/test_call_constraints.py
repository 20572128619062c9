"""Constraints of calls and of reasoning, and which parsers read an answer."""

import json
from typing import Any, ClassVar, cast

import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import ConfigError, InvalidRequest
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.conversation.dialect import Dialect, dialect_of
from pagoda_frontend.conversation.thinking_budget import with_thinking_budget
from pagoda_frontend.conversation.tool_constraint import constraint_of, frames_of
from pagoda_frontend.conversation.tools import ToolPlan, plan_tools
from pagoda_frontend.openai.protocol import ChatBody
from tests.unit.frontend.conversation.small_parsers import Calls, Tagged, Words


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
    with pytest.raises(InvalidRequest, match="needs a structural tag with the key format") as caught:
        budget(3, older)
    assert caught.value.field == "thinking_token_budget"
