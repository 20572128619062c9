"""Which calls of which pages, under which names, are refused, and in which words."""

from typing import Any

import orjson
import pytest
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.http.browsers import RefuseForeignPages, refuse_forms

FOREIGN = "Origin is {!r}, must be this server's or one of --allowed-origins"
NAME = "Host is {!r}, must be localhost, an IP address or one of --allowed-hosts"
SITE = "Sec-Fetch-Site is {!r}, must be same-origin"


async def refusal(headers: dict[str, str], *, method: str = "POST", kind: str = "http", **given: Any) -> str | None:
    """Why a call is refused; None where it is passed on."""
    settings: dict[str, Any] = {"host": "127.0.0.1", "allowed_hosts": (), "origins": ()} | given
    passed: list[Scope] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope: Scope = {"type": kind, "method": method, "path": "/v1/models", "headers": raw}
    await RefuseForeignPages(app, **settings)(scope, receive, send)
    if passed:
        assert passed == [scope]
        assert not sent
        return None
    assert sent[0]["status"] == 403
    error = orjson.loads(sent[1]["body"])["error"]
    assert (error["type"], error["code"], error["param"]) == ("PermissionDeniedError", 403, None)
    return str(error["message"])


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, None),
        ({"host": "localhost"}, None),
        ({"sec-fetch-site": "same-origin"}, None),
        ({"sec-fetch-site": "none", "origin": "https://a.example"}, None),
        ({"sec-fetch-site": "cross-site"}, SITE.format("cross-site")),
        ({"sec-fetch-site": "same-site"}, SITE.format("same-site")),
        ({"sec-fetch-site": "x" * 150}, SITE.format("x" * 100)),
        ({"host": "localhost:80", "origin": "http://localhost:80"}, None),
        ({"host": "LOCALHOST:80", "origin": "HTTP://localhost:80"}, None),
        ({"host": "localhost:80", "origin": "http://localhost:81"}, FOREIGN.format("http://localhost:81")),
        ({"host": "localhost", "origin": "null"}, FOREIGN.format("null")),
        ({"host": "localhost", "origin": "localhost"}, FOREIGN.format("localhost")),
        ({"host": "localhost", "origin": "http://" + "y" * 150}, FOREIGN.format("http://" + "y" * 93)),
        (
            {"host": "localhost", "origin": "http://localhost", "sec-fetch-site": "cross-site"},
            SITE.format("cross-site"),
        ),
    ],
)
async def test_who_may_change_something(headers: dict[str, str], message: str | None) -> None:
    assert await refusal(headers) == message
    assert await refusal(headers, origins=("*",)) is None
    for method in ("GET", "HEAD", "OPTIONS"):
        assert await refusal(headers, method=method) is None
    for method in ("PUT", "DELETE", "PATCH"):
        assert await refusal(headers, method=method) == message


async def test_allowed_origins_are_whole_and_may_call_from_other_sites() -> None:
    headers = {"origin": "https://a.example", "sec-fetch-site": "cross-site", "host": "localhost"}
    assert await refusal(headers, origins=("https://a.example",)) is None
    assert await refusal(headers, origins=("https://a.example:443",)) == FOREIGN.format("https://a.example")


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("", True),
        ("localhost", True),
        ("localhost.", True),
        ("a.b.localhost", True),
        ("alocalhost.com", False),
        ("gpu-7", True),
        ("gpu-7:8000", True),
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),
        ("[::1]", True),
        ("[::1]:8000", True),
        ("10.0.0.1.nip.io", False),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("evil.example:port", False),
        ("given.example", True),
        ("GIVEN.example:1", True),
        ("sub.given.example", False),
        ("1.2.3", False),
    ],
)
async def test_names_under_which_a_server_on_loopback_is_called(host: str, is_own: bool) -> None:
    message = None if is_own else NAME.format(host)
    for method in ("GET", "POST"):
        assert await refusal({"host": host}, method=method, allowed_hosts=("Given.Example",)) == message
        assert await refusal({"host": host}, method=method, allowed_hosts=("given.example", "*")) is None
        assert await refusal({"host": host}, method=method, host="0.0.0.0") is None


async def test_long_names_are_cut_in_the_message_and_the_own_one_is_known() -> None:
    assert await refusal({"host": "a." + "b" * 150}) == NAME.format("a." + "b" * 98)
    assert await refusal({"host": "my.name"}, host="localhost", allowed_hosts=("my.name",)) is None


async def test_what_is_no_call_over_http_is_passed_on() -> None:
    for kind in ("lifespan", "websocket"):
        assert await refusal({"host": "evil.example", "origin": "null"}, kind=kind) is None


@pytest.mark.parametrize(
    ("content_type", "is_form"),
    [
        (None, False),
        ("application/json", False),
        ("application/json; charset=text/plain", False),
        ("text/plain", True),
        (" Text/Plain ; charset=utf-8", True),
        ("multipart/form-data; boundary=x", True),
        ("application/x-www-form-urlencoded", True),
    ],
)
def test_forms_are_refused(content_type: str | None, is_form: bool) -> None:
    headers = Headers({} if content_type is None else {"content-type": content_type})
    if not is_form:
        refuse_forms(headers)
        return
    with pytest.raises(InvalidRequest, match=r"Content-Type must be application/json or absent, got '[a-z/-]+'$"):
        refuse_forms(headers)
