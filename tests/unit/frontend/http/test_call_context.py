"""Whose call it is, how urgent, how long: tenants, bounds of priority and timeout."""

from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.http.calls import call_of
from pagoda_frontend.openai.protocol import CompletionBody
from pagoda_frontend.requests.call_context import CallContext, claimed_tenant


def call(headers: dict[str, str] | None = None, **fields: Any) -> CallContext:
    headers = headers or {}
    body = CompletionBody.model_validate({"prompt": "x", **fields})
    return call_of(headers, body, tenant=claimed_tenant(headers), request_id="a")


def terms(headers: dict[str, str] | None = None, **fields: Any) -> tuple[str, int, float]:
    made = call(headers, **fields)
    return made.tenant, made.priority, made.timeout_s


def test_without_keys_callers_say_who_they_are_in_128_characters() -> None:
    headers = {"x-tenant-id": "t" * 200, "authorization": "Bearer first"}
    assert claimed_tenant(headers) == "t" * 128
    assert claimed_tenant({"authorization": "Bearer first"}) == ""


def test_a_call_says_nothing_of_itself_by_default() -> None:
    assert terms() == ("", 0, 0.0)
    assert terms(priority=None, timeout=None) == ("", 0, 0.0)


def test_headers_go_before_the_body() -> None:
    headers = {"x-vllm-priority": "0", "x-request-timeout": "2.5", "x-tenant-id": "t"}
    assert terms(headers, priority=7, timeout=9.0) == ("t", 0, 2.5)
    assert terms(priority=-7, timeout=9.0) == ("", -7, 9.0)


@pytest.mark.parametrize("value", ["9223372036854775807", "-9223372036854775808"])
def test_a_priority_fits_64_bits(value: str) -> None:
    assert call({"x-vllm-priority": value}).priority == int(value)


@pytest.mark.parametrize(
    ("header", "value", "field"),
    [
        ("x-vllm-priority", "9223372036854775808", "priority"),
        ("x-vllm-priority", "-9223372036854775809", "priority"),
        ("x-vllm-priority", "1.5", "priority"),
        ("x-vllm-priority", "", "priority"),
        ("x-request-timeout", "0", "timeout"),
        ("x-request-timeout", "-1", "timeout"),
        ("x-request-timeout", "nan", "timeout"),
        ("x-request-timeout", "inf", "timeout"),
        ("x-request-timeout", "soon", "timeout"),
    ],
)
def test_what_cannot_be_read_or_is_out_of_bounds_is_refused(header: str, value: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        terms({header: value})
    assert caught.value.field == field


def test_a_part_of_a_call_has_an_id_of_its_own_here_and_in_the_engine() -> None:
    whole = call({"x-tenant-id": "t"}, priority=3, timeout=2.0)
    parts = [whole.part(place) for place in range(2)]
    assert [part.request_id for part in parts] == ["a-0", "a-1"]
    assert len({whole.engine_id, *(part.engine_id for part in parts)}) == 3
    assert {(part.tenant, part.priority, part.timeout_s, part.created) for part in parts} == {
        ("t", 3, 2.0, whole.created)
    }
