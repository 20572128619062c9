"""The calls that a model has to make, as a constraint on its text: in its own way of writing, else as plain JSON."""

from collections.abc import Mapping
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.structured_outputs import StructuredOutputsParams
from pagoda_frontend.tool_parsers.base import ToolParser
from pagoda_frontend.tools import ToolPlan

Frames = dict[str, tuple[str, str]]


def frames_of(parser: type[ToolParser] | None, plan: ToolPlan) -> Frames | None:
    """What stands around the arguments of each tool; None where the model's way of writing has no such thing."""
    if parser is None:
        return None
    frames = {name: frame for name in plan.schemas if (frame := parser.frame(name)) is not None}
    return frames if len(frames) == len(plan.schemas) else None


def constraint_of(plan: ToolPlan, parser: type[ToolParser] | None) -> StructuredOutputsParams | None:
    """What the text must be, that required and named tools are called, and strict ones as they should be.

    Calls are asked for as the model learned to write them, and as JSON where that is not known: an array of name and
    parameters, or the arguments of the one tool that is named. None where the model is free.

    Raises:
        InvalidRequest: the schemas are too large.
    """
    frames = frames_of(parser, plan)
    is_free = plan.choice == "auto"
    if plan.choice == "none" or (is_free and not plan.has_strict_tools):
        return None
    schemas = plan.closed_schemas()
    try:
        if frames is not None and parser is not None and (parser.trigger or not is_free):
            tag = _tag(frames, schemas, parser, plan)
            return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag})
        if is_free:
            return None
        schema = (
            _array_schema(schemas, is_parallel=plan.is_parallel) if plan.choice == "required" else schemas[plan.name]
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
    if plan.choice == "auto":
        return {**common, "type": "triggered_tags", "triggers": [parser.trigger]}
    return {**common, "type": "tags_with_separator", "separator": parser.separator, "at_least_one": True}


def _array_schema(schemas: dict[str, dict[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """An array of calls. Each tool's schema is a definition; what refers to it from within is led there."""
    calls, definitions = [], {}
    for place, (name, schema) in enumerate(schemas.items()):
        root = f"#/$defs/tool{place}"
        definitions[f"tool{place}"] = _moved(schema, root)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": root}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    return array if is_parallel else {**array, "maxItems": 1}


def _moved(node: Any, root: str) -> Any:
    """`node` with its references from the top as references from `root`."""
    if isinstance(node, list):
        return [_moved(item, root) for item in node]
    if not isinstance(node, dict):
        return node
    moved = {key: _moved(value, root) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved
