"""Turns required tool calls into a constraint on the text: in the model's own format if known, else as plain JSON."""

from collections.abc import Mapping
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.conversation.tools import ToolPlan
from pagoda_frontend.tool_parsers.base import ToolParser
from pagoda_frontend.tool_parsers.formats import Format, array_schema

Frames = dict[str, tuple[str, str]]


def frames_of(parser: type[ToolParser] | None, plan: ToolPlan) -> Frames | None:
    """The text before and after the arguments of each tool; None where the model's format has no such frame."""
    if parser is None:
        return None
    frames = {name: frame for name in plan.schemas if (frame := parser.frame(name)) is not None}
    return frames if len(frames) == len(plan.schemas) else None


def constraint_of(
    plan: ToolPlan, parser: type[ToolParser] | None, *, asked: StructuredOutputsParams | None = None
) -> StructuredOutputsParams | None:
    """The constraint on the text: required and named tools are called, strict ones match their schemas; otherwise
    `asked`.

    Where the model is free to call, `asked` takes precedence: it is the form of an answer without calls.

    Calls take the model's own format, or JSON where that is not known: an array of objects with name and parameters, or
    the arguments of the named tool.

    Raises:
        InvalidRequest: the schemas are too large.
    """
    if asked is not None and plan.choice == "auto":
        return asked
    return _calls_of(plan, parser) or asked


def _calls_of(plan: ToolPlan, parser: type[ToolParser] | None) -> StructuredOutputsParams | None:
    """None where the model is free."""
    frames = frames_of(parser, plan)
    is_free = plan.choice == "auto"
    if plan.choice == "none" or (is_free and not plan.has_strict_tools):
        return None
    schemas = plan.closed_schemas()
    try:
        if is_free:
            format_ = parser.free_format(schemas, is_parallel=plan.is_parallel) if parser is not None else None
            return None if format_ is None else _structural_tag(format_)
        if frames is not None and parser is not None:
            return _structural_tag(_tag(frames, schemas, parser, plan))
        schema = (
            array_schema(schemas, is_parallel=plan.is_parallel) if plan.choice == "required" else schemas[plan.name]
        )
        return StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("structured_outputs.", "tools: "), field="tools") from error


def _tag(
    frames: Frames, schemas: Mapping[str, dict[str, Any]], parser: type[ToolParser], plan: ToolPlan
) -> dict[str, Any]:
    tags = [
        {"begin": frames[name][0], "content": {"type": "json_schema", "json_schema": schema}, "end": frames[name][1]}
        for name, schema in schemas.items()
    ]
    is_one = plan.choice == "named" or not plan.is_parallel
    common = {"tags": tags, "stop_after_first": is_one}
    return {**common, "type": "tags_with_separator", "separator": parser.separator, "at_least_one": True}


def _structural_tag(format_: Format) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": format_})
