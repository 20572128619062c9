"""How much the status page remembers and shows, and its files: each number and header that a browser relies on."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.observability import history, request_log, statistics
from pagoda_frontend.observability.request_log import RequestLog
from pagoda_frontend.openai import chat, completions
from pagoda_frontend.pages.status import serve_file
from pagoda_frontend.requests import call_context
from pagoda_frontend.responses import handlers, items, store
from pagoda_frontend.serving import serving


def follow(log: RequestLog, request_id: str) -> Any:
    return log.follow(request_id, tenant="", num_prompt_tokens=1, num_sequences=1)


def test_a_quarter_of_an_hour_is_kept_and_the_log_has_a_line_every_ten_seconds() -> None:
    assert (history.PERIOD_S, history.NUM_POINTS, history.SHARES) == (5.0, 180, (0.5, 0.95, 0.99))
    assert statistics.PERIOD_S == 10.0


def test_the_oldest_200_calls_that_run_are_shown_and_50_that_ended() -> None:
    log = RequestLog()
    with contextlib.ExitStack() as calls:
        for number in range(201):
            calls.enter_context(follow(log, f"r{number}"))
        assert [call.request_id for call in log.running()] == [f"r{number}" for number in range(200)]
    assert log.running() == []
    assert [call.request_id for call in log.ended()] == [f"r{number}" for number in range(50)], "the latest end first"


def test_an_error_is_shown_in_200_characters_and_a_bug_by_its_kind() -> None:
    log = RequestLog()
    for error in (InvalidRequest("x" * 201), KeyError("secret")):
        with pytest.raises(type(error)), follow(log, "r"):
            raise error
    assert [(call.state, call.reason) for call in log.ended()] == [("failed", "KeyError"), ("failed", "x" * 200)]
    assert request_log.MAX_REASON_CHARS == 200


def test_bounds_that_the_apis_have() -> None:
    assert (chat.MAX_STOP_STRINGS, chat.MAX_CONVERSATIONS, completions.MAX_PROMPTS) == (4, 1024, 1024)
    assert (call_context.MAX_REQUEST_ID_CHARS, call_context.MAX_TENANT_CHARS) == (128, 128)
    assert (handlers.MAX_METADATA, items.MAX_PAGE, items.DEFAULT_PAGE) == (16, 100, 20)
    assert store.MAX_STORED_BYTES == 33_554_432
    assert (serving.RETRY_AFTER_S, serving.LOAD_RETRY_S) == (1.0, 5.0)


def asked(**headers: str) -> Any:
    return SimpleNamespace(headers=headers)


async def test_a_file_of_the_page_has_these_headers() -> None:
    answer = serve_file(b"content", "text/css")
    whole: Any = await answer(asked())
    headers = dict(whole.headers)
    tag = headers.pop("etag")
    assert (len(tag), tag[0], tag[-1]) == (18, '"', '"')
    assert (whole.status_code, whole.body) == (200, b"content")
    assert headers == {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "content-length": "7",
        "content-type": "text/css; charset=utf-8",
    }
    known: Any = await answer(asked(**{"if-none-match": tag}))
    assert (known.status_code, known.body, known.headers["etag"]) == (304, b"", tag)
    assert (await answer(asked(**{"if-none-match": '"other"'}))).status_code == 200
