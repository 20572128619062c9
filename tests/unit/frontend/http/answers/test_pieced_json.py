"""Long answers are made and written as their client takes them, and are the same JSON as short ones."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from pagoda_common.errors import QueueFull
from pagoda_frontend.budget.work_pool import WorkPool
from pagoda_frontend.http.answers.pieced_json import MIN_PIECE_BYTES, WHOLE_BYTES, PiecedJson, long_json_response
from pagoda_frontend.http.body import json_response
from pagoda_frontend.openai.mapped import Mapped, json_pieces


def text_of(number: int) -> str:
    return f"{number:0100}"


def made(num_items: int, make: Callable[[Any], Any] = text_of) -> dict[str, Any]:
    return {"a": 1, "rows": [{"items": Mapped(make, range(num_items)), "index": 0}], "z": None}


class Client:
    """Records its messages while `may_take` is set, and disconnects when `has_left` is set."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.has_left = asyncio.Event()

    async def send(self, message: Message) -> None:
        await self.may_take.wait()
        self.sent.append(message)

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.fixture
def work() -> WorkPool:
    return WorkPool()


@pytest.mark.parametrize("num_items", [0, 1, 63, 64, 65, 200])
def test_a_list_that_is_made_as_it_is_written_is_the_same_json(num_items: int) -> None:
    expected = {"a": 1, "rows": [{"items": [text_of(one) for one in range(num_items)], "index": 0}], "z": None}
    assert json.loads(b"".join(json_pieces(made(num_items)))) == expected
    assert json.loads(bytes(json_response(made(num_items)).body)) == expected


def test_many_objects_with_such_lists_are_the_same_json() -> None:
    value = {"choices": [{"index": place, "items": Mapped(text_of, range(2))} for place in range(1500)]}
    expected = [{"index": place, "items": [text_of(0), text_of(1)]} for place in range(1500)]
    assert json.loads(b"".join(json_pieces(value))) == {"choices": expected}


async def test_a_short_answer_is_whole_and_a_long_one_is_in_pieces(work: WorkPool) -> None:
    headers = {"X-Request-Id": "r"}
    short = await long_json_response(lambda: made(3), headers, work=work, num_bytes=WHOLE_BYTES)
    assert short.headers["content-length"] == str(len(short.body))
    client = Client()
    answer = await long_json_response(lambda: made(5000), headers, work=work, num_bytes=WHOLE_BYTES + 1)
    await answer({}, client.receive, client.send)
    head, *bodies = client.sent
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert dict(head["headers"]) == {b"x-request-id": b"r", b"content-type": b"application/json"}
    assert json.loads(client.body)["rows"][0]["items"] == [text_of(one) for one in range(5000)]
    sizes = [len(one["body"]) for one in bodies]
    assert min(sizes[:-2]) >= MIN_PIECE_BYTES
    assert max(sizes) < 2 * MIN_PIECE_BYTES
    assert [one["more_body"] for one in bodies] == [True] * (len(bodies) - 1) + [False]


async def test_what_is_not_read_is_not_made_and_a_client_that_leaves_ends_it(work: WorkPool) -> None:
    read: list[int] = []
    loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

    def note(number: int) -> str:
        read.append(number)
        loop.call_soon_threadsafe(has_begun.set)
        return text_of(number)

    client = Client()
    client.may_take.clear()
    task = asyncio.create_task(PiecedJson(made(10**6, note), {}, work=work)({}, client.receive, client.send))
    await has_begun.wait()
    await work.run(lambda: None, num_bytes=10**6)  # the first piece is whole
    num_read = len(read)
    assert num_read < 5000
    client.has_left.set()
    await task
    assert (client.sent, len(read)) == ([], num_read)


async def test_a_full_pool_is_a_refusal_before_the_head_and_a_pause_after_it() -> None:
    class Work:
        """Refuses some calls."""

        def __init__(self, *refused: int) -> None:
            self.num_calls = 0
            self._refused = refused

        async def run(self, work: Callable[[], Any], *, num_bytes: int) -> Any:
            self.num_calls += 1
            if self.num_calls in self._refused:
                raise QueueFull("full")
            return work()

    client, pool = Client(), Work(1)
    with pytest.raises(QueueFull):
        await PiecedJson(made(5000), {}, work=pool)({}, client.receive, client.send)  # type: ignore[arg-type]  # a double
    assert client.sent == []
    pool = Work(2, 3)
    await PiecedJson(made(5000), {}, work=pool)({}, client.receive, client.send)  # type: ignore[arg-type]  # a double
    assert len(json.loads(client.body)["rows"][0]["items"]) == 5000


def test_a_mapped_list_is_like_the_list_of_what_is_made() -> None:
    mapped = Mapped(str, [1, 2, 3])
    assert mapped == ["1", "2", "3"]
    assert mapped != ["1", "2"]
    assert mapped != ("1", "2", "3")
    assert (mapped[0], mapped[-1], len(mapped), list(mapped[1:])) == ("1", "3", 3, ["2", "3"])
    others = ["a", "b"]
    assert mapped.__add__(others) == ["1", "2", "3", "a", "b"]
    assert (mapped + Mapped(str, [4]))[2:] == ["3", "4"]
    assert repr(mapped) == "['1', '2', '3']"
