"""JSON as it comes: where a value ends, and as soon as it can be known, whether an object is a call."""

import json

import pytest

from pagoda_frontend.tool_parsers.json_text import JsonCall, JsonSpan, Outcome, after_space

MORE, DONE, FAILED, BROKEN = Outcome.MORE, Outcome.DONE, Outcome.FAILED, Outcome.BROKEN
NAME = '{"name": "f"'


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        *((text, MORE) for text in ("", " ", "{", ' {"na', '{"name"', '{"name" ', '{"name": ', '{"name": "f"', NAME)),
        *((text, MORE) for text in (f"{NAME}, ", f'{NAME}, "arguments": {{"a": 1', f'{NAME}, "arguments": {{}} ')),
        *((text, FAILED) for text in ("x", " [", "{5", "{name", '{"name" 5', '{"name", ', '{"other": ', '{"name": 5,')),
        *((text, FAILED) for text in ('{"name": "", ', '{"name": [}', '{"name": "f";', f'{NAME}, "arguments": 5,')),
        *((text, FAILED) for text in (f'{NAME}, "arguments": [1],', f'{NAME}, "arguments": {{"a" 1}}', "{}")),
        *((text, FAILED) for text in ('{"name": "\\ud800",', '{"arguments": "{", "name": "f"}')),
        *(
            (text, DONE)
            for text in (f"{NAME}}}", f'{NAME}, "arguments": {{"a": 1}}}}', f'{NAME}, "parameters": null}}')
        ),
        *((text, DONE) for text in ('{"arguments": "{}", "name": "f"}', f'{NAME}, "id": [1, {{}}], "x": true}}')),
        *((text, DONE) for text in ('{"function": {"name": "f", "arguments": {"a": 1}}}',)),
    ],
)
def test_an_object_is_a_call_or_not_as_soon_as_that_is_known(text: str, outcome: Outcome) -> None:
    keys = frozenset({"name", "arguments", "function"})
    assert JsonCall(first_keys=keys).read(text) == outcome
    piecewise = JsonCall(first_keys=keys)
    outcomes = [piecewise.read(text[:end]) for end in range(len(text) + 1)]
    assert next((one for one in outcomes if one is not MORE), MORE) == outcome
    assert piecewise.has_begun == (outcome is DONE)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (f"{NAME}}}", "{}"),
        (f'{NAME}, "arguments": {{"a": [1, 2.50]}}}}', '{"a": [1, 2.50]}'),
        (f'{NAME}, "arguments": "{{\\"a\\": 1}}"}}', '{"a": 1}'),
        (f'{NAME}, "parameters": null}}', "{}"),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"function": {"name": "f", "parameters": {"a": 1}}}', '{"a": 1}'),
        ('{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}', '{"a": 1}'),
    ],
)
def test_arguments_of_a_call(text: str, arguments: str) -> None:
    call = JsonCall()
    assert call.read(f"{text} more") is DONE
    assert (call.name, "".join(call.news), call.place, call.is_arguing) == ("f", arguments, len(text), False)


def test_arguments_may_be_needed_and_any_key_may_come_first() -> None:
    assert JsonCall(needs_arguments=True).read(f"{NAME}}}") is FAILED
    assert JsonCall(needs_arguments=True).read(f'{NAME}, "arguments": {{}}}}') is DONE
    assert JsonCall().read('{"other": 5, "name": "f"}') is DONE


@pytest.mark.parametrize(("num_chars", "begins"), [(9, False), (10, False), (11, True)])
def test_a_call_begins_once_its_arguments_are_too_long_to_be_held(num_chars: int, begins: bool) -> None:
    call = JsonCall(max_held_chars=10)
    assert call.read(f'{NAME}, "arguments": {{"' + "a" * (num_chars - 2)) is MORE
    assert (call.has_begun, call.is_arguing) == (begins, True)
    broken = f'{NAME}, "arguments": {{"' + "a" * (num_chars - 3) + '";'
    assert JsonCall(max_held_chars=10).read(broken) is (BROKEN if begins else FAILED)


def test_a_call_whose_brace_is_missing_is_one() -> None:
    call = JsonCall()
    assert call.read(f'{NAME}, "arguments": {{"a": 1}}</tool_call>') is BROKEN
    assert (call.has_begun, "".join(call.news)) == (True, '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "place", "is_done", "is_broken"),
    [
        ('{"a": "}"} x', 10, True, False),
        ('"a\\"b" x', 6, True, False),
        ("12.5e3, ", 6, True, False),
        ("12", 2, False, False),
        ("[1, [2]", 7, False, False),
        ("{1; 2}", 2, False, True),
        ("]", 0, False, True),
        (";", 0, False, True),
        ('"a\\', 2, False, False),
        ('"a\\\\"', 5, True, False),
    ],
)
def test_where_a_value_ends(text: str, place: int, is_done: bool, is_broken: bool) -> None:
    span = JsonSpan()
    assert span.read(text, 0) == (place, text[:place])
    assert (span.is_done, span.is_broken) == (is_done, is_broken)
    again, at, parts = JsonSpan(), 0, ""
    for end in range(len(text) + 1):
        at, part = again.read(text[:end], at)
        parts += part
    assert (at, parts, again.is_done, again.is_broken) == (place, text[:place], is_done, is_broken)


def test_control_characters_in_strings_become_escapes() -> None:
    assert json.loads(JsonSpan().read('{"a": "x\n\ty"}', 0)[1]) == {"a": "x\n\ty"}
    assert JsonSpan().read("{\n}", 0) == (3, "{\n}")
    assert (after_space(" \n x", 1), after_space("  ")) == (3, 2)
