"""From bytes to a body and from a value to an answer, without a server: bounds, faults word by word, what is held."""

import json
from typing import Any, cast

import orjson
import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import Code, InvalidRequest, QueueFull
from pagoda_frontend.budget import caller as callers
from pagoda_frontend.budget.fields import BOUNDS, check_count
from pagoda_frontend.budget.held_memory import HeldMemory, Hold
from pagoda_frontend.http import body as bodies
from pagoda_frontend.http.body import TENANT, json_response, owner_of, parse_body, read_bytes
from pagoda_frontend.http.calls import note_tenant, tenant_of
from pagoda_frontend.http.errors import BodyTooLarge, ClientDisconnected
from pagoda_frontend.openai.protocol import CompletionBody


class Request:
    """Sends its pieces, the last one with `more_body` false unless it is cut short."""

    def __init__(
        self,
        *pieces: bytes | None,
        content_type: str | None = "application/json",
        length: str | None = None,
        **scope: Any,
    ) -> None:
        self._pieces = list(pieces)
        self.num_read = 0
        self.scope: dict[str, Any] = {"client": ("10.0.0.7", 5000), **scope}
        self.headers = {
            name: value
            for name, value in (("content-type", content_type), ("content-length", length))
            if value is not None
        }

    async def receive(self) -> dict[str, Any]:
        self.num_read += 1
        piece = self._pieces.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}


class Serving:
    """What reading asks of a frontend."""

    def __init__(self, *, max_bytes: int = 100, max_values: int = 1000, max_held: int = 10**6) -> None:
        self.config = FrontendConfig(max_request_body_bytes=max_bytes, max_request_values=max_values)
        self.held_memory = HeldMemory(max_bytes=max_held)
        self.has_api_keys = False


async def read(request: Request, serving: Serving | None = None) -> bytes:
    return await read_bytes(cast("Any", request), serving=cast("Any", serving or Serving()))


async def test_a_body_is_its_pieces_and_is_held_for_its_owner() -> None:
    serving = Serving()
    hold = Hold(serving.held_memory)
    callers.current_hold.set(hold)
    assert await read(Request(b"[1,", b"", b"2]"), serving) == b"[1,2]"
    assert (hold.owner, callers.caller.get()) == ("10.0.0.7", "10.0.0.7")
    assert hold.num_bytes == hold.num_bytes_seen == 5 + 40 * 3, "a list and two numbers"
    assert callers.held_bytes() == 125
    callers.admit_hold(0)
    assert (hold.num_bytes, serving.held_memory.num_bytes, callers.held_bytes()) == (0, 0, 125)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "it is missing"),
        ("text/plain", "got 'text/plain'"),
        ("application/jsonx", "got 'application/jsonx'"),
        ("application/json", None),
        (" Application/JSON ; charset=utf-8", None),
    ],
)
async def test_a_body_says_that_it_is_json(given: str | None, told: str | None) -> None:
    if told is None:
        assert await read(Request(b"1", content_type=given)) == b"1"
        return
    with pytest.raises(InvalidRequest) as caught:
        await read(Request(b"1", content_type=given))
    assert str(caught.value) == f"Content-Type must be application/json, {told}"


async def test_a_body_takes_its_bound_and_nothing_beyond() -> None:
    assert len(await read(Request(b"x" * 60, b"x" * 40, length="100"))) == 100
    serving = Serving()
    hold = Hold(serving.held_memory)
    callers.current_hold.set(hold)
    for request, size in (
        (Request(b"x" * 60, b"x" * 41), 101),
        (Request(b"x", length="101"), 101),
        (Request(b"x" * 300, length="200"), 300),
        (Request(b"x" * 101, length=""), 101),
    ):
        with pytest.raises(BodyTooLarge) as caught:
            await read(request, serving)
        assert str(caught.value) == f"request body has {size} bytes, at most 100 are read"
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert (caught.value.http.status, caught.value.http.type) == (413, "BadRequestError")
        assert hold.num_bytes == 0


async def test_a_body_that_is_refused_is_read_on_for_eight_times_its_bound() -> None:
    request = Request(*[b"x" * 100] * 20)
    with pytest.raises(BodyTooLarge):
        await read(request)
    assert request.num_read == 9
    small = Request(*[b"x" * 100] * 8)
    with pytest.raises(BodyTooLarge, match="800 bytes"):
        await read(small)
    assert small.num_read == 8


async def test_a_body_that_is_refused_is_read_on_for_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Time:
        @staticmethod
        def monotonic() -> float:
            nonlocal now
            now += 5.0
            return now

    monkeypatch.setattr(bodies, "time", Time)
    request = Request(*[b"x" * 60] * 10)
    with pytest.raises(BodyTooLarge):
        await read(request)
    assert request.num_read == 4, "the second is too much; a look at 10 s, 15 s and 20 s"


async def test_other_faults_of_a_body() -> None:
    with pytest.raises(ClientDisconnected):
        await read(Request(b"x", None))
    with pytest.raises(InvalidRequest, match="more than 3 values"):
        await read(Request(b"[1,2,3,4]"), Serving(max_values=3))
    full = Serving(max_held=80)
    with pytest.raises(QueueFull):
        await read(Request(b"1"), full)
    assert full.held_memory.num_bytes == 0
    fitting = Serving(max_held=82)
    assert await read(Request(b"1"), fitting) == b"1"


def test_whose_share_a_call_has() -> None:
    assert owner_of({"client": ("10.0.0.7", 1)}) == "10.0.0.7"
    assert owner_of({"client": ("2001:db8::1", 1)}) == "2001:db8::/64"
    assert owner_of({"client": None}) == owner_of({}) == ""
    scope: dict[str, Any] = {"client": ("10.0.0.7", 1)}
    note_tenant(scope, "key-1")
    assert scope[TENANT] == "key-1"
    assert owner_of(scope) == "key-1"


def test_who_calls() -> None:
    serving = cast("Any", Serving())
    request: Any = Request(**{TENANT: "key-1"})
    request.headers["x-tenant-id"] = "me"
    said = tenant_of(request, serving=serving)
    assert said != "key-1"
    serving.has_api_keys = True
    assert tenant_of(request, serving=serving) == "key-1"
    with pytest.raises(KeyError):
        tenant_of(cast("Any", Request()), serving=serving)


# Bodies.


def parsed(raw: bytes) -> CompletionBody:
    return parse_body(raw, CompletionBody)


@pytest.mark.parametrize(
    ("raw", "message", "field"),
    [
        (b"[1]", "request body must be a JSON object, got list", None),
        (b"5", "request body must be a JSON object, got int", None),
        (b"null", "request body must be a JSON object, got NoneType", None),
        (b'{"prompt": "x", "user": NaN}', None, "user"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature", "temperature"),
        (b'{"stop": ' + b'"' + b"x" * 4097 + b'"}', "stop must have at most 4096 bytes each, got 4097", "stop"),
    ],
)
def test_a_fault_of_a_body_is_told(raw: bytes, message: str | None, field: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(raw)
    assert caught.value.field == field
    if message is not None:
        assert message in str(caught.value)


def test_what_is_no_json_is_told() -> None:
    for raw in (b"{", b"{'a': 1}", b"", b"NaN}"):
        with pytest.raises(InvalidRequest) as caught:
            parsed(raw)
        assert str(caught.value).startswith("request body is not valid JSON: ")
    with pytest.raises(InvalidRequest) as caught:
        parsed(b'{"prompt": "x", "unknown": NaN}')
    assert str(caught.value).startswith("request body is not valid JSON: "), "a field that no one looks at"


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_a_field_is_nested_200_levels_deep_at_most() -> None:
    assert parsed(b'{"prompt": "x", "other": ' + nested(200) + b"}").prompt == "x"
    with pytest.raises(InvalidRequest) as caught:
        parsed(b'{"prompt": "x", "first": [[]], "other": ' + nested(201) + b"}")
    assert (str(caught.value), caught.value.field) == ("other is nested more than 200 levels deep", "other")
    objects = b'{"a":' * 201 + b"1" + b"}" * 201
    with pytest.raises(InvalidRequest, match="other is nested more than 200 levels deep"):
        parsed(b'{"prompt": "x", "other": ' + objects + b"}")


# Answers.


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1},
        {"a": [1, 2], "b": {"c": [{"d": "é"}]}, "n": None},
        {"a": []},
        [],
        {"data": list(range(1023))},
        {"data": list(range(1024))},
        {"data": list(range(1025))},
        {"data": [[place] for place in range(3000)]},
        {"data": [{"values": list(range(2050)), "index": place} for place in range(3)]},
        {"data": [{"index": place} for place in range(1025)]},
        {"big": 2**70, "rows": [{"big": 2**70}]},
        [{"a": [1]}, {"b": 2}],
    ],
)
def test_an_answer_in_pieces_is_the_same_json(value: Any) -> None:
    response = json_response(value, {"X-A": "1"})
    assert json.loads(response.body) == value
    assert b", " not in bytes(response.body)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-a"] == "1"
    assert response.status_code == 200


def test_the_bounds_of_all_fields() -> None:
    bounds = {name: (row.what, row.max_items, row.max_bytes, row.max_total_bytes) for name, row in BOUNDS.items()}
    assert bounds == {
        "messages": ("messages", 4096, 0, 0),
        "input": ("items or inputs", 4096, 0, 0),
        "prompt": ("prompts", 1024, 0, 0),
        "tools": ("tools", 1024, 0, 0),
        "documents": ("documents", 2048, 0, 0),
        "stop": ("strings", 128, 4096, 0),
        "stop_sequences": ("strings", 128, 4096, 0),
        "bad_words": ("words", 128, 4096, 0),
        "logit_bias": ("entries", 1024, 0, 0),
        "stop_token_ids": ("token ids", 1024, 0, 0),
        "allowed_token_ids": ("token ids", 16384, 0, 0),
        "logprob_token_ids": ("token ids", 128, 0, 0),
        "vllm_xargs": ("fields", 1024, 0, 65536),
        "chat_template_kwargs": ("fields", 256, 0, 65536),
        "metadata": ("fields", 256, 0, 65536),
        "include": ("names", 64, 256, 0),
        "chat_template": ("bytes", 0, 262144, 0),
        "system": ("parts", 4096, 0, 0),
        "model": ("bytes", 0, 1024, 0),
        "user": ("bytes", 0, 4096, 0),
        "request_id": ("bytes", 0, 1024, 0),
        "cache_salt": ("bytes", 0, 1024, 0),
    }


def test_counts_over_grpc_have_the_same_bounds() -> None:
    check_count("messages", [0] * 4096)
    check_count("model", "x" * 10_000)
    with pytest.raises(InvalidRequest) as caught:
        check_count("messages", [0] * 4097)
    told = "messages must have at most 4096 messages, got 4097"
    assert (str(caught.value), caught.value.field) == (told, "messages")
    assert orjson.loads(json_response({}).body) == {}
