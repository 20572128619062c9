"""Faults in the words of a body's fields, and places in a stream that is resumed."""

import json
import uuid
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.engine.stream import AdoptedRequest, AdoptedSequence, Known
from pagoda_common.errors import InvalidRequest, NotFound, NotReady, PagodaError
from pagoda_frontend.openai.protocol import ChatBody
from pagoda_frontend.requests.call_context import CallContext, begin_call, claimed_tenant, unique_id
from pagoda_frontend.requests.errors import fields_named, validation_message
from pagoda_frontend.requests.event_ids import EventIds, Place, place_of, with_id
from pagoda_frontend.requests.resume import note_of, resumption_at
from pagoda_frontend.requests.structured import renamed


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [], **fields})


@pytest.mark.parametrize(
    ("field", "given", "message"),
    [
        ("response_format", "structured_outputs.json_object is x", "response_format is x"),
        ("response_format", "structured_outputs.json is x", "response_format.json_schema.schema is x"),
        ("response_format", "structured_outputs.structural_tag is x", "response_format is x"),
        ("tools", "structured_outputs.json is x", "tools is x"),
        ("tools", "structured_outputs.regex is x", "tools.regex is x"),
        ("structured_outputs", "structured_outputs.json is x", "structured_outputs.json is x"),
    ],
)
def test_a_fault_is_told_in_the_words_of_its_field(field: str, given: str, message: str) -> None:
    error = renamed(InvalidRequest(given, field="structured_outputs"), field)
    assert (error.message, error.field) == (message, field)


def test_fields_have_the_names_that_the_client_knows() -> None:
    for field, message, shown in (
        ("max_tokens", "max_tokens is 0, max_tokens must be 1", ("a is 0, a must be 1", "a")),
        ("other", "max_tokens is 0", ("max_tokens is 0", "other")),
        (None, "max_tokens is 0", ("max_tokens is 0", None)),
    ):
        with pytest.raises(PagodaError) as caught, fields_named({"max_tokens": "a"}):
            raise InvalidRequest(message, field=field)
        assert (caught.value.message, caught.value.field) == shown


def test_what_is_wrong_with_a_body_is_one_line() -> None:
    def error(number: int, kind: str = "x", given: Any = "v") -> dict[str, Any]:
        return {"loc": ("a", number), "msg": "must be b", "input": given, "type": kind}

    told = "a.1: must be b (got 'v') [x]; a.2: must be b [missing]"
    assert validation_message([error(1), error(2, "missing")]) == told
    many = validation_message([error(number) for number in range(12)])
    assert many.count("must be b") == 10
    assert many.endswith("; and 2 more")
    assert "more" not in validation_message([error(number) for number in range(10)])
    assert validation_message([error(1, given="v" * 98)]).endswith(f"(got '{'v' * 98}') [x]")
    assert validation_message([error(1, given="v" * 99)]).endswith(f"(got '{'v' * 99}…) [x]")


def test_an_event_says_how_much_the_client_has() -> None:
    ids = EventIds(response_id="cmpl-1", n=3)
    assert ids.line() == b"id: cmpl-1:0,0,0\n"
    news = SimpleNamespace(index=1, num_output_tokens=7, finish_reason=None)
    assert ids.advance(news) == b"id: cmpl-1:0,7,0\n"
    assert ids.advance(SimpleNamespace(index=2, num_output_tokens=3, finish_reason="stop")) == b"id: cmpl-1:0,7,3f\n"
    assert ids.line(12) == b"id: cmpl-1:0,7,3f@12\n"


def test_an_id_goes_with_the_last_of_several_events() -> None:
    assert with_id(b"data: 1\n\n", b"id: a\n") == b"id: a\ndata: 1\n\n"
    assert with_id(b"data: 1\n\ndata: 2\n\n", b"id: a\n") == b"data: 1\n\nid: a\ndata: 2\n\n"
    assert with_id(b"a: 1\nb: 2\n\nc: 3\n\nd: 4\n\n", b"id: a\n") == b"a: 1\nb: 2\n\nc: 3\n\nid: a\nd: 4\n\n"


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("cmpl-1:7", Place(key="cmpl-1", known=(Known(7),))),
        ("a:b:0,7f,12@34", Place(key="a:b", known=(Known(0), Known(7, True), Known(12)), num_events=34)),
    ],
)
def test_a_place_is_read_from_the_header(given: str, place: Place) -> None:
    assert place_of({"last-event-id": given}) == place
    assert place.field == "Last-Event-ID"
    assert place_of({}) is None


@pytest.mark.parametrize(
    "given",
    [
        "",
        "x",
        "x:",
        ":7",
        "x:7,",
        "x:f",
        "x:-1",
        "x:7@",
        "x y:7",
        "x:12345678901",
        f"{'x' * 513}:7",
        "x:" + "7," * 9000,
    ],
)
def test_what_is_no_place_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID is not an event id of this server") as caught:
        place_of({"last-event-id": given})
    assert caught.value.field == "Last-Event-ID"


def adopted(request_id: str, *, tenant: str = "me", num: int = 1, path: str = "/p") -> AdoptedRequest:
    return AdoptedRequest(
        request_id=request_id,
        attempt=1,
        prompt_token_ids=[1],
        seed=0,
        arrival_time_ns=0,
        timeout_s=0.0,
        sequences=[AdoptedSequence(token_ids=[])] * num,
        note=note_of(chat(n=3), path=path, created=77, more="x"),
        tenant=tenant,
    )


class Adopting:
    """An engine that knows some requests."""

    def __init__(self, *requests: AdoptedRequest, error: Exception | None = None) -> None:
        self.requests, self.error, self.asked = list(requests), error, list[str]()

    async def adopt(self, key: str) -> list[AdoptedRequest]:
        self.asked.append(key)
        if self.error is not None:
            raise self.error
        return list(self.requests)


async def resumed(engine: Adopting, *, num: int = 1, path: str = "/p", tenant: str = "me") -> Any:
    place = Place(key="key", known=(Known(0),) * num, field="F")
    return await resumption_at(place, engine=cast("Any", engine), path=path, tenant=tenant)


async def test_a_stream_is_adopted_with_its_body() -> None:
    names = ["a-10", "a-2", "a-1"]
    engine = Adopting(*[adopted(name, num=2) for name in names], adopted("a-0", tenant="other"))
    found = await resumed(engine, num=6)
    assert engine.asked == ["key"]
    assert [request.request_id for request in found.adopted] == ["a-1", "a-2", "a-10"], "numbered"
    assert (found.response_id, found.created, found.note["more"]) == ("key", 77, "x")
    assert found.body_as(ChatBody) == chat(n=3)
    assert json.loads(note_of("text", path="/p", created=1)) == {"path": "/p", "created": 1, "body": "text"}


@pytest.mark.parametrize(
    ("engine", "fields", "error", "message"),
    [
        (Adopting(error=NotFound("gone")), {}, NotFound, "F: the stream 'key' is unknown, or its lease is over"),
        (Adopting(), {}, NotFound, "F: the stream 'key' is unknown"),
        (Adopting(adopted("a", tenant="other")), {}, NotFound, "F: the stream 'key' is unknown"),
        (Adopting(adopted("a", num=2)), {}, NotFound, "F does not fit the stream 'key'"),
        (Adopting(adopted("a")), {"path": "/q"}, InvalidRequest, "F belongs to a stream of /p, this call is /q"),
    ],
)
async def test_a_stream_that_is_not_the_callers_is_not_adopted(
    engine: Adopting, fields: dict[str, Any], error: type[PagodaError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        await resumed(engine, **fields)
    assert caught.value.field == "F"
    with pytest.raises(NotReady):
        await resumed(Adopting(error=NotReady("away")))


def test_a_call_has_ids_of_its_own_or_those_of_the_stream_that_it_resumes() -> None:
    call = begin_call("c", created=5, tenant="t", priority=-3, timeout_s=2.5)
    same = CallContext(request_id="c", engine_id=call.engine_id, created=5, tenant="t", priority=-3, timeout_s=2.5)
    assert call == same
    prefix, _, rest = call.engine_id.partition("-")
    assert (prefix, len(rest)) == ("c", 8)
    part = call.part(2)
    assert (part.request_id, part.tenant, part.priority, part.timeout_s) == ("c-2", "t", -3, 2.5)
    assert part.engine_id.startswith("c-2-")
    noted = call.noting(chat(n=2), path="/p", more=1)
    assert json.loads(noted.note) == {"path": "/p", "created": 5, "body": '{"n":2,"messages":[]}', "more": 1}
    assert (noted.request_id, noted.engine_id, call.note) == ("c", call.engine_id, b"")
    resumption: Any = SimpleNamespace(response_id="r", created=9, adopted=[adopted("r-engine"), adopted("x")])
    again = begin_call("c", created=5, resumption=resumption)
    assert (again.request_id, again.engine_id, again.created) == ("r", "r-engine", 9)
    assert again.resumption is resumption


def test_ids_are_what_a_client_gave_or_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unique_id("cmpl-", "a b/ü:._-Z9") == "cmpl-a_b__:._-Z9"
    assert unique_id("cmpl-", "x" * 200) == "cmpl-" + "x" * 128
    monkeypatch.setattr(uuid, "uuid4", lambda: SimpleNamespace(hex="f" * 32))
    assert unique_id("cmpl-") == unique_id("cmpl-", "") == "cmpl-" + "f" * 32
    assert claimed_tenant({"x-tenant-id": "t" * 200}) == "t" * 128
    assert claimed_tenant({}) == ""
