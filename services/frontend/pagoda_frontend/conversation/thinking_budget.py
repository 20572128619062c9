"""Bounds the tokens of reasoning by a constraint: after that many tokens the end marker is forced.

The worker applies grammars anyway, and a grammar may refer to tokens, so the engine needs nothing else for this.
"""

from dataclasses import replace
from typing import Any

import orjson

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.conversation.dialect import Dialect
from pagoda_frontend.reasoning_parsers.base import ReasoningParser

FIELD = "thinking_token_budget"
UNLIMITED = -1


def with_thinking_budget(
    constraint: StructuredOutputsParams | None,
    budget: int | None,
    *,
    dialect: Dialect,
    prompt: str,
    tokenizer: Tokenizer,
    max_model_len: int,
    is_wish: bool = False,
) -> StructuredOutputsParams | None:
    """`constraint`, with at most `budget` tokens of reasoning before it.

    Args:
        constraint: of the answer; None for no constraint.
        budget: tokens between the markers of reasoning; None or -1 for any number of them.
        prompt: the rendered conversation, whose end may open or close the reasoning.
        is_wish: ignore `budget` where it cannot be enforced.

    Raises:
        InvalidRequest: `budget` is below -1, or no reasoning parser says by which token the reasoning ends.
    """
    if is_wish and not _can_hold(dialect, prompt=prompt, tokenizer=tokenizer):
        return constraint
    if budget is None or budget == UNLIMITED:
        return constraint
    if budget < 0:
        raise InvalidRequest(f"{FIELD} must be at least 0, or -1 for no bound, got {budget}", field=FIELD)
    if dialect.reasoning_parser is None:
        raise InvalidRequest(f"{FIELD} needs a server started with --reasoning-parser", field=FIELD)
    parser = dialect.reasoning_parser(prompt=prompt)
    if parser.is_over or budget >= max_model_len:
        return constraint
    start, end = _markers(parser, tokenizer)
    if end is None or (start is None and not parser.is_inside):
        raise InvalidRequest(f"{FIELD} needs reasoning whose markers are single tokens of the model", field=FIELD)
    if constraint is not None:
        has_reasoning = bool(constraint.start_after_token_ids)
        return _composed(constraint, _reasoning(start, end, budget)) if has_reasoning else constraint
    if parser.is_inside:
        return StructuredOutputsParams(grammar=f"{_reasoning(start, end, budget)} rest\nrest: <[*]>*")
    grammar = f"start: plain (<[{start}]> {_thoughts(end, budget)} <[{end}]> plain)*\nplain: <[^{start}]>*"
    return StructuredOutputsParams(grammar=grammar)


def _markers(parser: ReasoningParser, tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """The tokens that begin and end the reasoning; None where a marker is not a single token."""
    return _token_id(tokenizer, getattr(parser, "start", "")), _token_id(tokenizer, parser.end)


def _can_hold(dialect: Dialect, *, prompt: str, tokenizer: Tokenizer) -> bool:
    """Whether reasoning after `prompt` may be bounded."""
    if dialect.reasoning_parser is None:
        return False
    parser = dialect.reasoning_parser(prompt=prompt)
    start, end = _markers(parser, tokenizer)
    return end is not None and (start is not None or parser.is_inside)


def _token_id(tokenizer: Tokenizer, marker: str) -> int | None:
    return tokenizer.token_id(marker) if marker else None


def _thoughts(end: int, budget: int) -> str:
    return f"<[^{end}]>{{0,{budget}}}" if budget else ""


def _reasoning(start: int | None, end: int, budget: int) -> str:
    """The rule of reasoning and its end; a start marker that the model writes does not count."""
    opening = f"<[{start}]>?" if start is not None else ""
    return f"start: {opening} {_thoughts(end, budget)} <[{end}]>"


def _composed(constraint: StructuredOutputsParams, reasoning: str) -> StructuredOutputsParams:
    """Reasoning, then the text that `constraint` asks for."""
    format_ = {"type": "sequence", "elements": [{"type": "grammar", "grammar": reasoning}, _format(constraint)]}
    return replace(
        constraint,
        json=None,
        json_object=None,
        regex=None,
        choice=None,
        grammar=None,
        structural_tag={"type": "structural_tag", "format": format_},
        start_after_token_ids=(),
    )


def _format(constraint: StructuredOutputsParams) -> dict[str, Any]:
    """`constraint` as a format of a structural tag.

    Raises:
        InvalidRequest: it is a structural tag of the older shape, without a format.
    """
    if isinstance(constraint.json, str):
        return {"type": "json_schema", "json_schema": orjson.loads(constraint.json)}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in constraint.choice]}
    if constraint.grammar is not None:
        return {"type": "grammar", "grammar": constraint.grammar}
    if isinstance(constraint.structural_tag, str):
        tag = orjson.loads(constraint.structural_tag)
        if "format" not in tag:
            raise InvalidRequest(f"{FIELD} needs a structural tag with the key format", field=FIELD)
        return dict(tag["format"])
    return {"type": "json_schema", "json_schema": {"type": "object"}}
