"""StructuredOutputsParams: the constraint that an output must obey, validated. Names are vLLM's. Knows no grammar."""

import json
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from pagoda_common.errors import InvalidRequest

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Exactly one of these fields is set."""
MAX_CONSTRAINT_BYTES = 256 * 1024
"""Size of a schema, regex, grammar or list of choices."""
MAX_JSON_DEPTH = 64
MAX_CHOICES = 10_000
MAX_START_TOKENS = 64
HOLD_CAPABILITY = "constraints"
"""Capability of a worker that compiles a constraint before the steps (HoldConstraint)."""
_FIELD = "structured_outputs"


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(f"{_FIELD}.{message}", field=_FIELD)


@dataclass(kw_only=True, slots=True)
class StructuredOutputsParams:
    """A constraint on the text of an output, from its first token to its end token.

    Raises:
        InvalidRequest: not exactly one constraint is given, or it is empty, too large or of the wrong type; whether it
            can be compiled is for pagoda_common.grammar.matcher to say.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema; stored as JSON text."""
    regex: str | None = None
    """A regular expression that the whole output matches (syntax of Rust's regex crate, no look-around)."""
    choice: Sequence[str] | None = None
    """The output is one of these; stored as a tuple."""
    grammar: str | None = None
    """A context-free grammar: GBNF (`root ::= …`, EBNF as vLLM takes it) or Lark (`start: …`)."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with constrained parts between tags; stored as JSON text."""
    disable_any_whitespace: bool = False
    """JSON without any white space between its tokens."""
    disable_additional_properties: bool = False
    """JSON objects have no properties besides those that their schema names, unless it says so itself."""
    whitespace_pattern: str | None = None
    """Regular expression of what may stand between the tokens of JSON; None is a space, or a new line and up
    to 20 spaces or tabs."""
    start_after_token_ids: Sequence[int] = ()
    """The constraint begins after this run of output tokens (the end of reasoning); empty: at once. Before the run has
    appeared everything but an end may be sampled. Stored as a tuple."""

    backend: InitVar[str | None] = None
    """Accepted and not kept, as vLLM takes it: one engine (llguidance) serves all constraints."""
    disable_fallback: InitVar[bool | None] = None
    """The same."""

    def __post_init__(self, backend: str | None, disable_fallback: bool | None) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            wanted = f"structured_outputs must have exactly one of {', '.join(CONSTRAINTS)}"
            raise InvalidRequest(f"{wanted}, got {' and '.join(given) or 'none'}", field=_FIELD)
        self.json = _json_text("json", self.json)
        self.structural_tag = _json_text("structural_tag", self.structural_tag)
        for name in ("regex", "grammar"):
            _check_text(name, getattr(self, name))
        if self.regex is not None and "\0" in self.regex:
            raise _refuse("regex must not contain a NUL character")
        if self.json_object is not None and self.json_object is not True:
            raise _refuse(f"json_object must be true, got {self.json_object!r}")
        self._check_choice()
        self._check_options()

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        choices: Any = self.choice
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise _refuse(f"choice must be a list of strings, got {choices!r}")
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise _refuse(f"choice must have between 1 and {MAX_CHOICES} strings, got {len(choices)}")
        for place, text in enumerate(choices):
            if not isinstance(text, str) or not text:
                raise _refuse(f"choice.{place} must be a string that is not empty, got {text!r}")
            _check_text(f"choice.{place}", text)
        size = sum(len(text.encode()) for text in choices)
        if size > MAX_CONSTRAINT_BYTES:
            raise _refuse(f"choice must have at most {MAX_CONSTRAINT_BYTES} bytes, got {size}")
        self.choice = tuple(dict.fromkeys(choices))

    def _check_options(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(f"{name} must be true or false, got {getattr(self, name)!r}")
        _check_text("whitespace_pattern", self.whitespace_pattern)
        run: Any = self.start_after_token_ids
        if isinstance(run, str) or not isinstance(run, Sequence) or len(run) > MAX_START_TOKENS:
            raise _refuse(f"start_after_token_ids must be at most {MAX_START_TOKENS} token ids, got {run!r}"[:300])
        for token_id in run:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**32:
                raise _refuse(f"start_after_token_ids must be token ids, got {token_id!r}")
        self.start_after_token_ids = tuple(run)

    @property
    def kind(self) -> str:
        """The name of the constraint that is set."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    @property
    def grammar_key(self) -> tuple[object, ...]:
        """Equal for parameters that compile to the same grammar."""
        return (
            self.kind,
            getattr(self, self.kind),
            self.disable_any_whitespace,
            self.disable_additional_properties,
            self.whitespace_pattern,
        )

    @property
    def num_bytes(self) -> int:
        """About the size of the constraint: of its text in characters."""
        value = getattr(self, self.kind)
        return len(value) if isinstance(value, str) else sum(map(len, value)) if isinstance(value, tuple) else 0


def _check_text(name: str, text: Any) -> None:
    if text is None:
        return
    if not isinstance(text, str) or not text:
        raise _refuse(f"{name} must be a string that is not empty, got {text!r}"[:300])
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _refuse(f"{name} must be valid Unicode") from None
    if size > MAX_CONSTRAINT_BYTES:
        raise _refuse(f"{name} must have at most {MAX_CONSTRAINT_BYTES} bytes, got {size}")


def _json_text(name: str, value: Any) -> str | None:
    """`value` (JSON text, or what it stands for) as compact JSON text."""
    if value is None:
        return None
    if isinstance(value, str):
        _check_text(name, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _refuse(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict) and not (name == "json" and isinstance(value, bool)):
        raise _refuse(f"{name} must be a JSON object, got {value!r}"[:300])
    if is_deeper_than(value, MAX_JSON_DEPTH):
        raise _refuse(f"{name} must be nested at most {MAX_JSON_DEPTH} levels deep")
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _refuse(f"{name} cannot be written as JSON: {error}") from None
    _check_text(name, text)
    return text


def is_deeper_than(value: Any, max_depth: int) -> bool:
    """Whether objects and lists in `value` are nested more than `max_depth` levels deep."""
    level = [value]
    for _ in range(max_depth):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [part for part in item.values() if isinstance(part, dict | list | tuple)]
            elif isinstance(item, list | tuple):
                inner += [part for part in item if isinstance(part, dict | list | tuple)]
        if not inner:
            return False
        level = inner
    return True
