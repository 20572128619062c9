"""Bodies to errors."""

import json

import pytest

from pagoda_common.engine.convert import error_from_proto, error_to_proto
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError, RequestFailed, ShareFull
from pagoda_frontend.http.body import parse_body
from pagoda_frontend.http.errors import error_object, error_response
from pagoda_frontend.observability.metrics import one_two_five
from pagoda_frontend.openai.protocol import CompletionBody
from pagoda_frontend.requests.call_context import unique_id
from pagoda_frontend.requests.errors import fields_named, validation_message


def test_a_servers_fault_shows_no_paths_addresses_or_tracebacks() -> None:
    message = "cannot read /srv/models/secret/model.safetensors at 0x7f00deadbeef\nTraceback: line 1"
    shown = error_object(RequestFailed(message))["message"]
    assert "secret" not in shown
    assert "0x7f00" not in shown
    assert "Traceback" not in shown
    assert "cannot read" in shown


def test_a_bug_says_nothing_of_itself() -> None:
    shown = error_object(ZeroDivisionError("division by zero"))
    assert shown["code"] == 500
    assert "division" not in shown["message"]


@pytest.mark.parametrize(("after_s", "header"), [(0.0, "1"), (0.2, "1"), (4.5, "5")])
def test_not_ready_says_when_to_come_again(after_s: float, header: str) -> None:
    response = error_response(NotReady("starting", retry_after_s=after_s))
    assert (response.status_code, response.headers["retry-after"]) == (503, header)


def test_a_client_that_has_its_share_of_the_queue_is_told_so() -> None:
    error = error_from_proto(error_to_proto(ShareFull("your share is 5", retry_after_s=1)))
    response = error_response(error)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert json.loads(response.body)["error"] == {
        "message": "your share is 5",
        "type": "RateLimitError",
        "param": None,
        "code": 429,
    }


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_every_code_has_a_status(code: Code) -> None:
    assert 400 <= error_response(PagodaError("x", code=code)).status_code < 600


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_name_their_field(number: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(f'{{"prompt": "x", "top_p": {number}}}'.encode(), CompletionBody)
    assert caught.value.field == "top_p"


def test_histogram_bounds() -> None:
    assert one_two_five(512) == [1, 2, 5, 10, 20, 50, 100, 200, 500]
    assert one_two_five(1) == [1]


def test_a_clients_id_is_made_safe_for_headers_and_logs() -> None:
    assert unique_id("cmpl-", "a b\r\n/日") == "cmpl-a_b____"
    assert len(unique_id("cmpl-", "x" * 1000)) == 133
    assert unique_id("cmpl-") != unique_id("cmpl-")


def test_a_byte_order_mark_is_no_fault() -> None:
    assert parse_body(b"\xef\xbb\xbf" + b'{"prompt": "x"}', CompletionBody).prompt == "x"


@pytest.mark.parametrize(("num_errors", "rest"), [(1, ""), (9, ""), (10, ""), (11, "and 1 more"), (25, "and 15 more")])
def test_ten_faults_of_a_body_are_named_and_the_others_counted(num_errors: int, rest: str) -> None:
    errors = [
        {"loc": ("messages", number, "role"), "msg": "must be a text", "type": "string_type", "input": number}
        for number in range(num_errors)
    ]
    lines = validation_message(errors).split("; ")
    shown = [
        f"messages.{number}.role: must be a text (got {number}) [string_type]" for number in range(min(num_errors, 10))
    ]
    assert lines == shown + ([rest] if rest else [])


def test_a_missing_field_has_no_value_and_a_long_one_its_beginning() -> None:
    missing = {"loc": ("prompt",), "msg": "Field required", "type": "missing", "input": {}}
    assert validation_message([missing]) == "prompt: Field required [missing]"
    long = {"loc": ("prompt",), "msg": "is wrong", "type": "x", "input": "y" * 10_000}
    assert len(validation_message([long])) < 150
    assert validation_message([long]).endswith("…) [x]")


def test_an_error_names_the_field_that_the_client_knows() -> None:
    with pytest.raises(InvalidRequest) as caught, fields_named({"prompt": "text"}):
        raise InvalidRequest("prompt is too long", field="prompt")
    assert (caught.value.field, caught.value.message) == ("text", "text is too long")
    with pytest.raises(InvalidRequest) as caught, fields_named({"prompt": "text"}):
        raise InvalidRequest("n is 0, prompt is fine", field="n")
    assert (caught.value.field, caught.value.message) == ("n", "n is 0, prompt is fine")
