"""Integers of any length survive a round trip."""

import orjson
import pytest

from pagoda_common.text import exact_json

INTEGERS = [0, 2**53 + 1, 2**63, 2**64, -(2**64) - 1, 10**21 + 1, 10**300 + 7]


@pytest.mark.parametrize("number", INTEGERS)
def test_an_integer_keeps_every_digit(number: int) -> None:
    value = {"a": [number, "é", 1.5, None], "b": {str(number): True}}
    text = exact_json.dumps(value)
    assert exact_json.loads(text) == value
    assert str(number).encode() in text
    assert exact_json.loads(text.decode()) == value


def test_what_is_no_json_is_refused_as_orjson_does() -> None:
    for text in ("", "[1,", "NaN", "01" * 20):
        with pytest.raises(orjson.JSONDecodeError):
            exact_json.loads(text)
    with pytest.raises((TypeError, ValueError)):
        exact_json.dumps({"a": object()})
