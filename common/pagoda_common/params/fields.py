"""One row of the table of sampling fields: type, bounds, and names elsewhere. Knows no values."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pagoda_common.errors import InvalidRequest

Api: TypeAlias = Literal["chat", "completions", "responses", "messages"]
Kind: TypeAlias = Literal["number", "integer", "flag", "token_ids", "texts", "other"]
Search: TypeAlias = Literal["fine", "ignored", "refused"]

EVERYWHERE: tuple[Api, ...] = ("chat", "completions", "responses", "messages")
METADATA = "sampling_field"
"""Key of a row in the metadata of a dataclass field."""
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingField:
    """All that the parts of Pagoda need to know of one field of SamplingParams."""

    kind: Kind
    """Kind of its values. Values of kind "other" are converted by hand wherever they are accepted."""
    apis: tuple[Api, ...] = ()
    """HTTP bodies that take it."""
    names: Mapping[Api, str] = dataclasses.field(default_factory=dict)
    """Its name in bodies, if it is another one."""
    proto: str | None = None
    """Field of pagoda.v1.SamplingParams; None: the engine does not hear of it."""
    generation_config: str | None = None
    """Field of the model's generation_config.json that is its default."""
    search: Search = "fine"
    """Effect on a beam search: "ignored" if it has no meaning there, "refused" if it would change the search."""
    column: Literal["float32", "int64"] | None = None
    """Data type of the worker's column, one value a slot; None: it has none, or one that is filled by hand."""
    low: float = -math.inf
    high: float = math.inf
    is_low_open: bool = False
    """Values must be greater than `low`."""
    max_items: int | None = None
    """Most token ids."""
    is_optional: bool = False
    """None is a value of its own."""
    name: str = ""
    """Set by `table_of`, as is the default."""
    default: Any = None

    @property
    def bound(self) -> str:
        """The bounds of numbers, in the words of messages and docs; "" where there are none."""
        if self.kind == "number":
            if self.high < math.inf:
                return f"in {'(' if self.is_low_open else '['}{self.low:g}, {self.high:g}]"
            return f"finite and greater than {self.low:g}" if self.is_low_open else "finite"
        if self.kind == "integer":
            return f"at least {self.low}" if self.high == math.inf else f"between {self.low} and {self.high}"
        return "" if self.max_items is None else f"at most {self.max_items} token ids"

    def name_in(self, api: Api) -> str | None:
        """Its name in `api`; None if `api` does not have it."""
        return self.names.get(api, self.name) if api in self.apis else None

    def checked(self, value: Any) -> Any:
        """`value` as SamplingParams stores it: token ids become a tuple without repetitions.

        Raises:
            InvalidRequest: it is of another type, or out of bounds; the message has name, bound and value.
        """
        if value is None and self.is_optional:
            return None
        if self.kind == "number":
            check_number(self.name, value, self)
        elif self.kind == "integer":
            check_integer(self.name, value, self)
        elif self.kind == "token_ids":
            return _token_ids(self, value or ())
        return value

    def is_set(self, value: Any) -> bool:
        """Whether `value`, of a body or of SamplingParams, asks for something else than the default."""
        return value is not None and value != self.default and value not in ((), [], {}, "")


def number(default: float, *, low: float, high: float = math.inf, is_low_open: bool = False, **row: Any) -> Any:
    """A dataclass field of a finite number, which every HTTP body takes and the worker has a column for."""
    row = {"apis": EVERYWHERE, "column": "float32"} | row
    return _field(default, kind="number", low=low, high=high, is_low_open=is_low_open, **row)


def integer(default: int | None, *, low: int, high: int | None = MAX_INT32, **row: Any) -> Any:
    """A dataclass field of an integer from `low` to `high` (None: any)."""
    row = {"apis": EVERYWHERE, "is_optional": default is None} | row
    return _field(default, kind="integer", low=low, high=math.inf if high is None else high, **row)


def flag(default: bool, **row: Any) -> Any:
    """A dataclass field of a bool."""
    return _field(default, kind="flag", **{"apis": EVERYWHERE, **row})


def token_ids(**row: Any) -> Any:
    """A dataclass field of token ids; None is none of them, unless it `is_optional`."""
    return _field(None, kind="token_ids", **{"apis": EVERYWHERE, **row})


def texts(**row: Any) -> Any:
    """A dataclass field of a list of texts, which SamplingParams checks itself."""
    return _field(None, kind="texts", **{"apis": EVERYWHERE, **row})


def other(default: Any = None, *, is_shown: bool = True, **row: Any) -> Any:
    """A dataclass field that is converted and checked by hand."""
    return dataclasses.field(default=default, repr=is_shown, metadata={METADATA: SamplingField(kind="other", **row)})


def _field(default: Any, **row: Any) -> Any:
    return dataclasses.field(default=default, metadata={METADATA: SamplingField(**row)})


def table_of(params: Any) -> dict[str, SamplingField]:
    """The rows of a dataclass by name, in its order.

    Raises:
        KeyError: a field has no row.
    """
    return {
        one.name: dataclasses.replace(one.metadata[METADATA], name=one.name, default=one.default)
        for one in dataclasses.fields(params)
    }


def names_as_in_chat(table: Mapping[str, SamplingField], api: Api) -> tuple[str, ...]:
    """Sampling fields of `api` that chat completions have under the same name."""
    names = ((row.name_in(api), row.name_in("chat")) for row in table.values())
    return tuple(name for name, chat_name in names if name is not None and name == chat_name)


def names_by_chat_name(table: Mapping[str, SamplingField], api: Api) -> dict[str, str]:
    """The names in `api` of sampling fields that are named differently in chat completions or in SamplingParams."""
    return {
        ours: name
        for row in table.values()
        if (name := row.name_in(api)) is not None
        for ours in (row.name, row.name_in("chat"))
        if ours is not None and ours != name
    }


UNSIGNED_32 = SamplingField(kind="integer", low=0, high=2**32 - 1)
"""Bounds of a token id, before anyone knows the vocabulary."""
FINITE = SamplingField(kind="number")


def check_number(name: str, value: Any, bounds: SamplingField) -> None:
    """Raises InvalidRequest unless `value` is a finite number within `bounds`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r}", field=name)
    inside = (bounds.low < value if bounds.is_low_open else bounds.low <= value) and value <= bounds.high
    if not (math.isfinite(value) and inside):
        raise InvalidRequest(f"{name} must be {bounds.bound}, got {value}", field=name)


def check_integer(name: str, value: Any, bounds: SamplingField) -> None:
    """Raises InvalidRequest unless `value` is an integer within `bounds`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", field=name)
    if not bounds.low <= value <= bounds.high:
        raise InvalidRequest(f"{name} must be {bounds.bound}, got {value}", field=name)


def _token_ids(row: SamplingField, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidRequest(f"{row.name} must be a list of token ids, got {ids!r}"[:300], field=row.name)
    if row.max_items is not None and len(ids) > row.max_items:  # before each one is looked at
        message = f"{row.name} must have at most {row.max_items} token ids, got {len(ids)}"
        raise InvalidRequest(message, field=row.name)
    for token_id in ids:
        check_integer(row.name, token_id, UNSIGNED_32)
    return tuple(dict.fromkeys(ids))
