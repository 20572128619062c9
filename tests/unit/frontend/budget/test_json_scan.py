"""The scan counts what a parser finds, wherever the bytes are cut, and refuses at its bounds."""

import itertools
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.budget import json_scan
from pagoda_frontend.budget.json_scan import JsonScan, scan

TEXTS = st.text(alphabet=st.sampled_from(list('ab,"\\[]{}:n\n🙂')), max_size=12)
JSON = st.recursive(
    st.one_of(st.none(), st.integers(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(TEXTS, inner, max_size=5)),
    max_leaves=30,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Values (one more for each empty list or object), texts, and lists and objects in `value`."""
    if isinstance(value, str):
        return 1, 1, 0
    if not isinstance(value, list | dict):
        return 1, 0, 0
    inner = [counts(item) for item in (value.values() if isinstance(value, dict) else value)]
    values, texts, containers = (sum(part[place] for part in inner) for place in range(3))
    return 1 + max(values, 1), texts + (len(value) if isinstance(value, dict) else 0), containers + 1


@given(value=JSON, cuts=st.lists(st.integers(0, 300), max_size=6), is_ascii=st.booleans())
def test_it_counts_what_is_there(value: Any, cuts: list[int], is_ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    seen = JsonScan()
    places = sorted({0, len(raw), *(min(cut, len(raw)) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        seen.feed(raw[start:end])
    assert (seen.num_values, seen.num_texts, seen.num_containers) == counts(value)


def test_a_cut_between_a_backslash_and_its_quote_is_no_end_of_a_text() -> None:
    raw = orjson.dumps(['a\\"b", ["', 1])
    for cut in range(len(raw)):
        seen = JsonScan()
        seen.feed(raw[:cut])
        seen.feed(raw[cut:])
        assert (seen.num_values, seen.num_texts, seen.num_containers) == (3, 1, 1), cut


def test_values_are_bounded() -> None:
    scan(b"[" + b"1," * (json_scan.MAX_VALUES - 2) + b"1]")
    with pytest.raises(InvalidRequest, match=f"more than {json_scan.MAX_VALUES} values"):
        scan(b"[" + b"1," * (json_scan.MAX_VALUES - 1) + b"1]")


@pytest.mark.parametrize("one", [b'""', b"[]", b"{}"])
def test_texts_lists_and_objects_are_bounded(one: bytes) -> None:
    bound = json_scan.MAX_TEXTS
    scan(b"[" + b",".join([one] * (bound - 1)) + b"]")
    with pytest.raises(InvalidRequest, match=f"more than {bound} texts"):
        scan(b"[" + b",".join([one] * bound) + b"]")


def test_it_ends_with_the_piece_in_which_the_bound_is_broken() -> None:
    """What comes after is not looked at, and need not be read."""
    seen = JsonScan(max_values=100)
    with pytest.raises(InvalidRequest):
        seen.feed(b"1," * (10 * json_scan.SLICE_BYTES))
    assert seen.num_values <= json_scan.SLICE_BYTES
