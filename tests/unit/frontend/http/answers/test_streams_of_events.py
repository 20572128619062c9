"""Streams of events over HTTP without a server: what is sent when, what a fault becomes, what a client has already."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from pagoda_common.errors import QueueFull
from pagoda_common.params.outputs import SequenceDelta
from pagoda_frontend.http.answers import sse
from pagoda_frontend.http.answers.sse import KEEP_ALIVE, EventStream, stream_events
from pagoda_frontend.requests.event_ids import EventIds


async def of(*parts: Any) -> AsyncGenerator[bytes]:
    for part in parts:
        if isinstance(part, Exception):
            raise part
        if isinstance(part, float):
            await asyncio.sleep(part)
            continue
        yield part


async def stays() -> Any:
    await asyncio.Event().wait()


async def sent(*parts: Any, keep_alive_s: float = 0.0, receive: Any = stays, path: str = "/v1/x") -> list[Any]:
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    stream = EventStream(of(*parts), request_id="r", keep_alive_s=keep_alive_s)
    await stream({"type": "http", "path": path}, receive, send)
    return told


async def test_events_are_sent_as_they_come() -> None:
    head, *bodies = await sent(b"a", b"b")
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert dict(head["headers"])[b"x-request-id"] == b"r"
    assert [(one["body"], one["more_body"]) for one in bodies] == [(b"a", True), (b"b", True), (b"", False)]


async def test_a_fault_before_the_first_event_has_a_status_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    head, body = await sent(QueueFull("full", retry_after_s=3))
    assert head["status"] == 503
    assert dict(head["headers"])[b"retry-after"] == b"3"
    assert orjson.loads(body["body"])["error"]["message"] == "full"
    anthropic, body = await sent(QueueFull("full"), path="/v1/messages")
    assert orjson.loads(body["body"])["type"] == "error"
    assert caplog.records == []
    head, body = await sent(ValueError("secret"))
    assert head["status"] == 500
    assert b"secret" not in body["body"]
    assert [record.getMessage() for record in caplog.records] == ["a stream failed"]
    assert anthropic["status"] == 503


@pytest.mark.parametrize(("fault", "message"), [(QueueFull("full"), "full"), (ValueError("secret"), None)])
async def test_a_later_fault_is_an_event(
    fault: Exception, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    head, first, last = await sent(b"a", fault)
    assert (head["status"], first["body"], last["more_body"]) == (200, b"a", False)
    event, done, rest = last["body"].split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    shown = orjson.loads(event.removeprefix(b"data: "))["error"]
    assert shown["message"] == (message or "The server had an error while processing your request.")
    assert [record.getMessage() for record in caplog.records] == ([] if message else ["a stream failed"])


async def test_a_stream_without_events_ends(caplog: pytest.LogCaptureFixture) -> None:
    head, last = await sent()
    assert caplog.records == []
    assert head["status"] == 200
    assert (last["body"], last["more_body"]) == (b"", False)


async def test_a_client_that_leaves_ends_its_stream() -> None:
    ended: list[str] = []

    async def long() -> AsyncGenerator[bytes]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    told: list[Any] = []
    has_begun = asyncio.Event()

    async def send(message: Any) -> None:
        told.append(message)
        if message.get("body") == b"a":
            has_begun.set()

    async def leaves() -> Any:
        await has_begun.wait()
        return {"type": "http.disconnect"}

    await EventStream(long(), request_id="r", keep_alive_s=0.0)({"path": "/"}, leaves, send)
    assert ended == ["ended"]
    assert [one.get("body") for one in told] == [None, b"a"], "nothing is sent to who is gone"


@pytest.mark.parametrize("begins", [False, True])
async def test_nothing_runs_on_after_a_client_that_leaves(begins: bool) -> None:
    ended: list[str] = []
    has_begun = asyncio.Event()

    async def long() -> AsyncGenerator[bytes]:
        try:
            has_begun.set()
            if begins:
                yield b"a"
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    async def send(message: Any) -> None:
        if message.get("body") == b"a":
            has_begun.set()

    async def leaves() -> Any:
        await has_begun.wait()
        return {"type": "http.disconnect"}

    await EventStream(long(), request_id="r", keep_alive_s=1000.0)({"path": "/"}, leaves, send)
    assert ended == ["ended"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("fault", [None, QueueFull("full"), ValueError("broken")])
async def test_comments_end_with_the_stream(fault: Exception | None) -> None:
    await sent(b"a", *([fault] if fault else []), keep_alive_s=1000.0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    slept: list[float] = []
    stream = EventStream(of(), request_id="r", keep_alive_s=15.0)
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append((now, message["body"]))

    async def sleep(time_s: float) -> None:
        nonlocal now
        slept.append(time_s)
        if len(slept) == 4:
            raise asyncio.CancelledError
        now += time_s
        if len(slept) == 2:
            stream._last_sent_s = now - 5.0  # an event came meanwhile

    monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(sse.asyncio, "sleep", sleep)
    stream._last_sent_s = now
    with pytest.raises(asyncio.CancelledError):
        await stream._keep_alive(cast("Any", send))
    assert slept == [15.0, 15.0, 10.0, 15.0]
    assert told == [(115.0, KEEP_ALIVE), (140.0, KEEP_ALIVE)]
    assert KEEP_ALIVE == b": keep-alive\n\n"


# What a stream is made of.


class Chunks:
    """Events by the text of a delta; without text there is none."""

    def opening(self) -> bytes:
        return b"open;"

    def delta(self, delta: SequenceDelta) -> bytes:
        return f"data: {delta.text}\n\n".encode() if delta.text else b""

    def num_log_probabilities(self, delta: SequenceDelta) -> int:
        return 1000 if delta.text == "long" else 0

    def closing(self) -> bytes:
        return b"close"


def news(text: str, num: int = 0, *, is_replayed: bool = False) -> SequenceDelta:
    return SequenceDelta(index=0, text=text, token_ids=[1], offset=0, num_output_tokens=num, is_replayed=is_replayed)


async def streamed(
    *deltas: list[SequenceDelta], ids: EventIds | None = None, resumes: bool = False
) -> tuple[list[bytes], list[str]]:
    released: list[str] = []

    async def source() -> AsyncGenerator[list[SequenceDelta]]:
        for one in deltas:
            yield one

    async def on_thread(work: Callable[[], bytes], *, num_bytes: int) -> bytes:
        released.append(f"{num_bytes} bytes on a thread")
        return work()

    run = SimpleNamespace(
        event_ids=ids,
        call=SimpleNamespace(resumption=object() if resumes else None),
        release=lambda: released.append("released"),
        on_thread=on_thread,
    )
    made = stream_events(cast("Any", SimpleNamespace(deltas=source)), cast("Any", Chunks()), cast("Any", run))
    return [body async for body in made], released


async def test_what_came_together_is_sent_together() -> None:
    bodies, released = await streamed([news("a"), news(""), news("b")], [news("")], [news("c")])
    assert bodies == [b"open;data: a\n\ndata: b\n\n", b"data: c\n\n", b"close"]
    assert released == ["released"]
    assert (await streamed([news("")]))[0] == [b"open;close"]


async def test_events_with_a_prompts_log_probabilities_are_made_on_a_thread() -> None:
    bodies, told = await streamed([news("a"), news("long"), news("b")])
    assert bodies == [b"open;data: a\n\ndata: long\n\ndata: b\n\n", b"close"]
    assert told == ["32000 bytes on a thread", "released"]


async def test_events_have_ids_and_what_a_client_has_is_not_sent_again() -> None:
    bodies, _ = await streamed([news("a", 1), news("b", 2)], ids=EventIds(response_id="r", n=1))
    assert bodies == [b"open;id: r:1\ndata: a\n\nid: r:2\ndata: b\n\n", b"close"]
    resumed, _ = await streamed(
        [news("a", 1, is_replayed=True), news("b", 2)], ids=EventIds(response_id="r", n=1), resumes=True
    )
    assert resumed == [b"id: r:2\ndata: b\n\n", b"close"]
