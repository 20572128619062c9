"""How many entries and bytes each field of a request may have: one table for every API. Knows no endpoint.

The table is applied to parsed JSON before any object is built from it, and to lists in gRPC messages.
docs/security.md shows the table.
"""

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_EXTRA_ARGS_BYTES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_PARTS = 8192
"""Maximum number of content parts, tool calls and results, over all messages of one request."""
MAX_VALUE_BYTES = 64 * 1024
"""Maximum size of a value of any shape, as `MAX_VALUES_BELOW` counts it."""


MAY_BE_TOKEN_IDS = ("prompt", "input")
"""Lists of numbers are one prompt there, which the context bounds."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The limit of a field in a request's body, wherever the field occurs."""

    field: str
    what: str
    """Name of its entries in messages."""
    max_items: int = 0
    """Entries of a list or an object; 0: it is a text."""
    max_bytes: int = 0
    """Maximum size of the text, or of each text in the list, in UTF-8; 0: the limit of the body."""
    max_total_bytes: int = 0
    """Maximum size of all its content; 0: the limit of the body."""

    def refuse(self, what: str, bound: int, got: int | str) -> InvalidRequest:
        """The error of a field that has more than `bound`."""
        return InvalidRequest(f"{self.field} must have at most {bound} {what}, got {got}", field=self.field)


BOUNDS = {
    bound.field: bound
    for bound in (
        Bound("messages", "messages", max_items=4096),
        Bound("input", "items or inputs", max_items=4096),
        Bound("prompt", "prompts", max_items=1024),
        Bound("tools", "tools", max_items=1024),
        Bound("documents", "documents", max_items=2048),
        Bound("stop", "strings", max_items=MAX_STOP_STRINGS, max_bytes=MAX_STOP_BYTES),
        Bound("stop_sequences", "strings", max_items=MAX_STOP_STRINGS, max_bytes=MAX_STOP_BYTES),
        Bound("bad_words", "words", max_items=MAX_BAD_WORDS, max_bytes=MAX_BAD_WORD_BYTES),
        Bound("logit_bias", "entries", max_items=MAX_LOGIT_BIASES),
        Bound("stop_token_ids", "token ids", max_items=MAX_STOP_TOKEN_IDS),
        Bound("allowed_token_ids", "token ids", max_items=MAX_ALLOWED_TOKEN_IDS),
        Bound("logprob_token_ids", "token ids", max_items=MAX_LOGPROB_TOKEN_IDS),
        Bound("vllm_xargs", "fields", max_items=1024, max_total_bytes=2 * MAX_EXTRA_ARGS_BYTES),
        Bound("chat_template_kwargs", "fields", max_items=256, max_total_bytes=MAX_VALUE_BYTES),
        Bound("metadata", "fields", max_items=256, max_total_bytes=MAX_VALUE_BYTES),
        Bound("include", "names", max_items=64, max_bytes=256),
        Bound("chat_template", "bytes", max_bytes=256 * 1024),
        Bound("system", "parts", max_items=4096),
        Bound("model", "bytes", max_bytes=1024),
        Bound("user", "bytes", max_bytes=4096),
        Bound("request_id", "bytes", max_bytes=1024),
        Bound("cache_salt", "bytes", max_bytes=1024),
    )
}
"""By the field's name."""


def check_fields(body: Mapping[str, Any]) -> None:
    """Check a body's fields against the table.

    Args:
        body: the parsed JSON.

    Raises:
        InvalidRequest: one has too many entries or bytes; `field` names it.
    """
    for name, value in body.items():
        bound = BOUNDS.get(name)
        if bound is not None and value is not None:
            _check(bound, value)
    for name in ("messages", "input"):
        if isinstance(body.get(name), list):
            _check_parts(name, body[name])


def check_count(field: str, value: Sized) -> None:
    """Raises InvalidRequest when `value` has more entries than `field` may have."""
    bound = BOUNDS[field]
    if bound.max_items and len(value) > bound.max_items:
        raise bound.refuse(bound.what, bound.max_items, len(value))


def _check(bound: Bound, value: Any) -> None:
    if isinstance(value, str):
        _check_text(bound, value)
    elif isinstance(value, list | dict):
        are_token_ids = bound.field in MAY_BE_TOKEN_IDS and isinstance(value, list) and value and type(value[0]) is int
        if bound.max_items and len(value) > bound.max_items and not are_token_ids:
            raise bound.refuse(bound.what, bound.max_items, len(value))
        if bound.max_bytes and isinstance(value, list):
            for text in value:
                if isinstance(text, str):
                    _check_text(bound, text)
    if bound.max_total_bytes and num_bytes_above(value, bound.max_total_bytes):
        raise bound.refuse("bytes", bound.max_total_bytes, "more")


def _check_text(bound: Bound, text: str) -> None:
    if bound.max_bytes and len(text) > bound.max_bytes // 4:
        size = len(text.encode(errors="surrogatepass"))
        if size > bound.max_bytes:
            raise bound.refuse("bytes" if bound.what == "bytes" else "bytes each", bound.max_bytes, size)


def _check_parts(name: str, messages: list[Any]) -> None:
    """The lists in messages: parts, calls, and the conversations of a batch."""
    bound, num_messages, num_parts = BOUNDS[name], 0, 0
    for message in messages:
        if isinstance(message, list) and message and type(message[0]) is int:
            continue  # token ids of a text
        if isinstance(message, list):
            num_messages += len(message)
            if num_messages > bound.max_items:
                raise bound.refuse("messages in all conversations", bound.max_items, "more")
            num_parts += sum(_num_parts(one) for one in message if isinstance(one, dict))
        elif isinstance(message, dict):
            num_parts += _num_parts(message)
    if num_parts > MAX_PARTS:
        raise bound.refuse("parts and calls in all messages", MAX_PARTS, num_parts)


def _num_parts(message: dict[str, Any]) -> int:
    number = 0
    for value in message.values():
        if isinstance(value, list):
            number += len(value)
            number += sum(len(inner) for part in value if isinstance(part, dict) for inner in _lists(part))
    return number


def _lists(part: dict[str, Any]) -> Iterator[list[Any]]:
    return (inner for inner in part.values() if isinstance(inner, list))


def num_bytes_above(value: Any, bound: int) -> bool:
    """Whether a value of JSON is larger than `bound` bytes: texts in UTF-8, and 4 bytes for each value.

    It reads no more of the value than it needs."""
    size, left = 0, [value]
    while left:
        one = left.pop()
        size += 4
        if isinstance(one, str):
            size += len(one) if one.isascii() else len(one.encode(errors="surrogatepass"))
        elif isinstance(one, dict):
            size += sum(map(len, one))
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
        if size + 4 * len(left) > bound:
            return True
    return False
