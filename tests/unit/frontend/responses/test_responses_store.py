"""What is kept of /v1/responses, and for how long."""

import asyncio

import pytest

from pagoda_common.errors import NotFound
from pagoda_frontend.responses.store import ResponseStore, StoredResponse, held_bytes_of


def stored(response_id: str, *, num_bytes: int = 1, tenant: str = "") -> StoredResponse:
    item = {"id": f"item-of-{response_id}"}
    return StoredResponse(tenant, {"id": response_id, "output": [item]}, [], num_bytes=num_bytes)


def kept(store: ResponseStore, *response_ids: str) -> list[str]:
    found = []
    for response_id in response_ids:
        try:
            found.append(store.get(response_id, "").response["id"])
        except NotFound:
            continue
    return found


def test_the_oldest_go_first() -> None:
    store = ResponseStore(max_responses=2)
    for name in "abc":
        store.add(stored(name))
    assert kept(store, "a", "b", "c") == ["b", "c"]
    assert len(store) == 2


def test_large_answers_make_room_for_themselves_and_the_newest_always_stays() -> None:
    store = ResponseStore(max_responses=10, max_bytes=100)
    for name in "abc":
        store.add(stored(name, num_bytes=40))
    assert kept(store, "a", "b", "c") == ["b", "c"]
    store.add(stored("d", num_bytes=1000))
    assert kept(store, "b", "c", "d") == ["d"]


async def test_what_is_still_made_stays() -> None:
    store = ResponseStore(max_responses=1)
    running = stored("a")
    running.task = asyncio.create_task(asyncio.sleep(60))
    store.add(running)
    store.add(stored("b"))
    assert kept(store, "a", "b") == ["a", "b"]
    running.task.cancel()
    await asyncio.wait({running.task})
    store.add(stored("c"))
    assert kept(store, "a", "b", "c") == ["c"]


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = ResponseStore(max_responses=0)
    store.add(stored("a"))
    assert kept(store, "a") == []


def test_nobody_sees_what_is_anothers() -> None:
    store = ResponseStore(max_responses=5)
    store.add(stored("a", tenant="mine"))
    with pytest.raises(NotFound, match="'a' not found"):
        store.get("a", "theirs")
    assert store.get("a", "mine").response["id"] == "a"
    assert store.items("theirs") == {}
    assert store.items("mine") == {"item-of-a": {"id": "item-of-a"}}


async def test_followers_get_every_event_once_from_where_they_ask() -> None:
    store = stored("a")
    store.events = []
    go_on = asyncio.Event()

    async def make() -> None:
        store.add_events([b"0", b"1"])
        await go_on.wait()
        store.add_events([b"2"])

    store.task = asyncio.create_task(make())
    all_of_it, rest = store.follow(0), store.follow(2)
    assert [await anext(all_of_it), await anext(all_of_it)] == [b"0", b"1"]
    waiting = asyncio.ensure_future(anext(rest))
    await asyncio.sleep(0)
    go_on.set()
    assert await waiting == b"2"
    assert [part async for part in all_of_it] == [b"2"]
    assert [part async for part in rest] == []


def test_others_find_nothing_and_nothing_is_kept_where_none_may_be() -> None:
    store = ResponseStore(max_responses=3)
    store.add(stored("a", tenant="blue"))
    store.add(stored("b", tenant="green"))
    assert store.find("a", "blue") is not None
    assert store.find("a", "green") is None
    assert list(store.items("green")) == ["item-of-b"]
    store.remove("nobody")
    store.add(stored("a", tenant="green"))
    assert (len(store), store.find("a", "blue")) == (2, None), "an id is kept once"
    silent = ResponseStore(max_responses=0)
    silent.add(stored("a"))
    assert len(silent) == 0


def test_a_store_may_be_full_to_the_byte() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    for name in "ab":
        store.add(stored(name, num_bytes=50))
    assert kept(store, "a", "b") == ["a", "b"]
    store = ResponseStore(max_responses=3, max_bytes=100)
    for name, num_bytes in (("a", 50), ("b", 50), ("c", 1)):
        store.add(stored(name, num_bytes=num_bytes))
    assert kept(store, "a", "b", "c") == ["b", "c"]


def test_memory_of_many_small_values_is_counted_as_well() -> None:
    long, many = [{"text": "a" * 10_000}], [{"text": ""}] * 1000
    assert held_bytes_of(long) < 11_000
    assert held_bytes_of(many) > 1000 * 300
    assert held_bytes_of(long, many) == held_bytes_of(long) + held_bytes_of(many)


def test_an_answer_that_has_grown_makes_room_when_it_is_whole() -> None:
    store = ResponseStore(max_responses=10, max_bytes=100)
    first, second = stored("a", num_bytes=10), stored("b", num_bytes=10)
    store.add(first)
    store.add(second)
    second.num_bytes = 95
    store.trim(newest=second)
    assert kept(store, "a", "b") == ["b"]


def test_events_count_while_they_come() -> None:
    one = stored("a", num_bytes=10)
    one.add_events([b"12345"])
    assert one.num_bytes == 10, "no one can follow it"
    one.events = []
    one.add_events([b"12345", b"6"])
    assert one.num_bytes == 16
