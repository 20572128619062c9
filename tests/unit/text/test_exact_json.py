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


def test_what_python_does_not_read_keeps_orjson_s_value() -> None:
    deep = "[" * 1000 + "1" * 25 + "]" * 1000  # deeper than json reads
    value = exact_json.loads(deep)
    for _ in range(1000):
        [value] = value
    assert value == pytest.approx(1.1111e24, rel=1e-3)


def test_numbers_are_looked_at_from_19_digits_on() -> None:
    for number in (10**18 - 1, 10**18, 2**64 - 1, 2**64, 10**19):
        assert exact_json.loads(str(number)) == number
        assert type(exact_json.loads(str(number))) is int
