"""Each field takes as many entries and bytes as the table says, and not one more; the docs show the table."""

import re
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.budget.fields import BOUNDS, MAX_PARTS, check_fields, num_bytes_above

PAGE = (Path(__file__).parents[4] / "docs" / "security.md").read_text()


def entries(field: str, number: int) -> Any:
    """A value of `field` with so many entries."""
    if field in ("logit_bias", "vllm_xargs", "chat_template_kwargs", "metadata"):
        return {str(place): 1 for place in range(number)}
    return [{}] * number if field in ("messages", "tools", "documents", "system", "input") else ["x"] * number


@pytest.mark.parametrize("field", [name for name, bound in BOUNDS.items() if bound.max_items])
def test_entries_are_bounded(field: str) -> None:
    bound = BOUNDS[field].max_items
    check_fields({field: entries(field, bound)})
    with pytest.raises(InvalidRequest, match=f"{field} must have at most {bound} .*, got {bound + 1}") as caught:
        check_fields({field: entries(field, bound + 1)})
    assert caught.value.field == field


@pytest.mark.parametrize("field", [name for name, bound in BOUNDS.items() if bound.max_bytes])
def test_bytes_are_bounded(field: str) -> None:
    bound = BOUNDS[field].max_bytes
    for good, bad in (("x" * bound, "x" * (bound + 1)), ("é" * (bound // 2), "é" * (bound // 2 + 1))):
        for wrap in (str, lambda text: [text]) if BOUNDS[field].max_items else (str,):
            check_fields({field: wrap(good)})
            with pytest.raises(InvalidRequest, match=f"{field} must have at most {bound} bytes"):
                check_fields({field: wrap(bad)})


@pytest.mark.parametrize("field", [name for name, bound in BOUNDS.items() if bound.max_total_bytes])
def test_all_that_is_in_a_field_is_bounded(field: str) -> None:
    bound = BOUNDS[field].max_total_bytes
    check_fields({field: {"a": ["x" * (bound - 100)]}})
    for bad in ({"a": ["x" * bound]}, {"a": [0] * (bound // 4)}, {"x" * bound: 1}, {"a": {"b": ["é" * (bound // 2)]}}):
        with pytest.raises(InvalidRequest, match=f"{field} must have at most {bound} bytes"):
            check_fields({field: bad})


@pytest.mark.parametrize("field", ["messages", "input"])
def test_parts_of_all_messages_are_bounded_together(field: str) -> None:
    parts = [{"type": "text"}] * (MAX_PARTS // 2)
    check_fields({field: [{"content": parts}, {"tool_calls": parts}]})
    for bad in (
        [{"content": parts}, {"tool_calls": parts}, {"x": [1]}],
        [{"content": [{"content": [*parts, *parts]}]}],
    ):
        with pytest.raises(InvalidRequest, match=f"at most {MAX_PARTS} parts"):
            check_fields({field: bad})


def test_messages_of_a_batch_are_bounded_together() -> None:
    bound = BOUNDS["messages"].max_items
    check_fields({"messages": [[{}] * (bound // 2)] * 2})
    with pytest.raises(InvalidRequest, match=f"at most {bound} messages"):
        check_fields({"messages": [[{}] * (bound // 2), [{}] * (bound // 2), [{}]]})


@pytest.mark.parametrize("field", ["prompt", "input"])
def test_a_list_of_token_ids_is_one_prompt(field: str) -> None:
    check_fields({field: [5] * 100_000})
    with pytest.raises(InvalidRequest):
        check_fields({field: ["x"] * 100_000})


def test_fields_of_any_shape_are_no_fault_of_the_budget() -> None:
    for value in (None, 5, True, "x", [], {}, [[]], [None], [5, "x"], {"a": None}):
        check_fields(dict.fromkeys(BOUNDS, value))


def test_size_is_counted_no_further_than_the_bound() -> None:
    assert not num_bytes_above({"a": [1, 2], "b": "xyz"}, 100)
    assert num_bytes_above({"a": [1] * 1000}, 100)


@pytest.mark.parametrize("field", BOUNDS)
def test_the_docs_show_the_table(field: str) -> None:
    bound = BOUNDS[field]
    row = re.search(rf"^\| `{field}` \|(.*)\|$", PAGE, re.MULTILINE)
    assert row is not None, f"docs/security.md has no row of {field}"
    for number in (bound.max_items, bound.max_bytes, bound.max_total_bytes):
        assert not number or f"{number:,}" in row[1], row[0]
