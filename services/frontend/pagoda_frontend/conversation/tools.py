"""Checks the tools of a conversation, and says which ones the model may or must call. No parsing, no engine."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.json_schema import without_additional_properties
from pagoda_common.params.structured_outputs import MAX_JSON_DEPTH, is_deeper_than
from pagoda_common.text import exact_json
from pagoda_frontend.openai.protocol import AllowedToolsChoice, ChatBody, NamedToolChoice, Tool

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Names that OpenAI and Anthropic accept, and dots, which tool servers put into names."""
TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
DEPRECATED = {"functions": "tools", "function_call": "tool_choice"}
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolPlan:
    """Which tools the model sees, and which of them it must call."""

    tools: Sequence[Tool] = ()
    """Shown to the model; none when it may not call any."""
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    """The tool that must be called, when one is named."""
    is_parallel: bool = True
    """Whether a message may have more than one call."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schema of the arguments, by name."""
        return {tool.function.name: _schema(tool) for tool in self.tools}

    @property
    def has_strict_tools(self) -> bool:
        """Whether arguments must match their schema even where the model is free to call."""
        return any(tool.function.strict for tool in self.tools)

    def closed_schemas(self) -> dict[str, dict[str, Any]]:
        """Schemas of the tools that must be called, closed to properties that they do not name. Where the model is free
        to call, tools that are not strict may have any arguments."""
        return {
            tool.function.name: _closed(_schema(tool)) if self.choice != "auto" or tool.function.strict else ANY_OBJECT
            for tool in self.tools
            if self.choice != "named" or tool.function.name == self.name
        }


def plan_tools(body: ChatBody, *, can_choose: bool) -> ToolPlan:
    """The options of `body`.

    Args:
        can_choose: the model may decide by itself to call tools, because the format of its calls is known.

    Raises:
        InvalidRequest: `field` names the field.
    """
    for name, instead in DEPRECATED.items():
        if (body.model_extra or {}).get(name) not in (None, "none"):
            raise InvalidRequest(f"{name} is deprecated and not supported: use {instead}", field=name)
    choice = body.tool_choice
    if body.tools is None:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools", field="tool_choice")
        return ToolPlan()
    if not body.tools:
        raise InvalidRequest("tools must not be empty: leave it out, or give at least one tool", field="tools")
    _check_tools(body.tools)
    if choice == "none":
        return ToolPlan()
    is_parallel = body.parallel_tool_calls is not False
    tools: Sequence[Tool] = body.tools
    if isinstance(choice, NamedToolChoice):
        [tool] = _named([choice], tools)
        return ToolPlan(tools=tools, choice="named", name=tool.function.name, is_parallel=is_parallel)
    if isinstance(choice, AllowedToolsChoice):
        tools = _named(choice.allowed_tools.tools, tools)
        if not tools:
            raise InvalidRequest("tool_choice.allowed_tools.tools must not be empty", field="tool_choice")
        choice = choice.allowed_tools.mode
    if choice == "required":
        return ToolPlan(tools=tools, choice="required", is_parallel=is_parallel)
    if not can_choose:
        raise InvalidRequest(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            field="tool_choice",
        )
    return ToolPlan(tools=tools, choice="auto", is_parallel=is_parallel)


def _named(choices: Sequence[NamedToolChoice], tools: Sequence[Tool]) -> list[Tool]:
    """The tools that `choices` name, each once."""
    known = {tool.function.name: tool for tool in tools}
    for choice in choices:
        name = choice.function.name
        if name not in known:
            raise InvalidRequest(
                f"tool_choice names {name!r}, must be one of the tools: {', '.join(known)}"[:1000], field="tool_choice"
            )
    return [known[name] for name in dict.fromkeys(choice.function.name for choice in choices)]


def _check_tools(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        name = tool.function.name
        if NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"tools.{place}.function.name must be 1 to 128 of the characters a-z, A-Z, 0-9, _, . and -, "
                f"got {name[:200]!r}",
                field="tools",
            )
        if name in seen:
            raise InvalidRequest(f"tools.{place}.function.name: there are two tools called {name!r}", field="tools")
        seen.add(name)
        _check_schema(tool.function.parameters, f"tools.{place}.function.parameters")


def _check_schema(schema: dict[str, Any] | None, name: str) -> None:
    """Check a schema without compiling it: it describes an object, and its keywords have valid values."""
    if not schema:
        return
    if is_deeper_than(schema, MAX_JSON_DEPTH):
        raise InvalidRequest(f"{name} must be nested at most {MAX_JSON_DEPTH} levels deep", field="tools")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{name}.type must be 'object', got {schema['type']!r}"[:300], field="tools")
    _check_keywords(schema, name)


def _check_keywords(schema: Any, name: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{name} must be a JSON schema, got {schema!r}"[:300], field="tools")
    kinds = schema.get("type", [])
    for kind in [kinds] if not isinstance(kinds, list) else kinds:
        if not isinstance(kind, str) or kind not in TYPES:
            raise InvalidRequest(f"{name}.type {kind!r} is not a type of JSON schema"[:300], field="tools")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise InvalidRequest(f"{name}.required must be a list of names, got {required!r}"[:300], field="tools")
    if not isinstance(schema.get("enum", []), list):
        raise InvalidRequest(f"{name}.enum must be a list, got {schema['enum']!r}"[:300], field="tools")
    for keyword in ("properties", "$defs", "definitions"):
        inner = schema.get(keyword, {})
        if not isinstance(inner, dict):
            raise InvalidRequest(f"{name}.{keyword} must be an object, got {inner!r}"[:300], field="tools")
        for key, part in inner.items():
            _check_keywords(part, f"{name}.{keyword}.{key}")
    for keyword in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword, [])
        if not isinstance(parts, list):
            raise InvalidRequest(f"{name}.{keyword} must be a list of schemas, got {parts!r}"[:300], field="tools")
        for place, part in enumerate(parts):
            _check_keywords(part, f"{name}.{keyword}.{place}")
    if "items" in schema:
        _check_keywords(schema["items"], f"{name}.items")


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of the tool's arguments, which are an object even if the schema does not say so."""
    parameters = tool.function.parameters
    return {"type": "object", **parameters} if parameters else {**ANY_OBJECT, "properties": {}}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` closed to properties that it does not name; unchanged where it combines several schemas."""
    if b'"allOf"' in exact_json.dumps(schema):
        return schema
    closed: dict[str, Any] = without_additional_properties(schema)
    return closed
