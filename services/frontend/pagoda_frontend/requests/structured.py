"""Structured outputs of a request body: OpenAI's response_format and vLLM's structured_outputs as one constraint."""

from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.openai.protocol import GenerationBody

REPLACED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
}
"""Older names that are refused, and what to write instead."""
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs_of(body: GenerationBody) -> StructuredOutputsParams | None:
    """The constraint that `body` asks for; None if none. It is not compiled yet.

    Raises:
        InvalidRequest: `field` is response_format, structured_outputs or an older name.
    """
    extra = body.model_extra or {}
    for name, instead in REPLACED.items():
        if extra.get(name) is not None:
            raise InvalidRequest(f"{name} is not supported: use {instead}", field=name)
    given = body.structured_outputs
    asked = None if given is None else _params(given)
    formatted = None if body.response_format is None else _of_response_format(body.response_format)
    if asked is not None and formatted is not None:
        raise InvalidRequest(
            "response_format and structured_outputs cannot both constrain the output", field="structured_outputs"
        )
    return asked or formatted


def constraint_field(body: GenerationBody) -> str:
    """The field that a constraint error refers to: a constraint that the body does not ask for comes from its tools."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    asks = body.response_format is not None and body.response_format.get("type") != "text"
    return "response_format" if asks else "tools"


def renamed(error: InvalidRequest, field: str) -> InvalidRequest:
    """`error` about a constraint, under the name of the field that it came from."""
    message = error.message
    if field == "response_format":
        message = message.replace("structured_outputs.json_object", "response_format")
        message = message.replace("structured_outputs.json", "response_format.json_schema.schema")
        message = message.replace("structured_outputs.structural_tag", "response_format")
    if field == "tools":
        message = message.replace("structured_outputs.json", "tools").replace("structured_outputs.", "tools.")
    return InvalidRequest(message, field=field)


def _params(given: dict[str, Any]) -> StructuredOutputsParams:
    known = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", *OPTIONS)
    return StructuredOutputsParams(**{name: given[name] for name in known if given.get(name) is not None})


def _of_response_format(response_format: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = response_format.get("type")
    try:
        if kind == "json_object":
            return StructuredOutputsParams(json_object=True)
        if kind == "json_schema":
            return StructuredOutputsParams(json=_schema(response_format.get("json_schema")))
        if kind == "structural_tag":
            return StructuredOutputsParams(structural_tag=response_format)
    except InvalidRequest as error:
        raise renamed(error, "response_format") from error
    if kind != "text":
        known = ", ".join(FORMATS)
        raise InvalidRequest(
            f"response_format.type must be one of {known}, got {kind!r}"[:300], field="response_format"
        )
    return None


def _schema(named: Any) -> Any:
    """The schema in {"name", "schema", "strict"}; it is enforced whether strict is true or not."""
    if not isinstance(named, dict):
        raise _refuse(f"json_schema must be an object with name and schema, got {named!r}")
    name, strict = named.get("name"), named.get("strict")
    if not isinstance(name, str) or not name:
        raise _refuse(f"json_schema.name must be a string that is not empty, got {name!r}")
    if strict is not None and not isinstance(strict, bool):
        raise _refuse(f"json_schema.strict must be true or false, got {strict!r}")
    schema = named.get("schema")
    if not isinstance(schema, dict | None):
        raise _refuse(f"json_schema.schema must be an object, got {schema!r}")
    return {} if schema is None else schema


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(f"response_format.{message}"[:300], field="response_format")
