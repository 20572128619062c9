"""Messages that wait for a reader: the window, its bounds, and when there is room again."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.engine.convert import FINISH_NUMBERS, token_ids_to_bytes
from pagoda_common.errors import PagodaError, QueueFull
from pagoda_scheduler.core.speculation import SpeculationCounters
from pagoda_scheduler.rpc import outbox as module
from pagoda_scheduler.rpc import sinks
from pagoda_scheduler.rpc.adoption import adopted_to_proto, origin_of
from pagoda_scheduler.rpc.outbox import Outbox
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from tests.unit.scheduler.stories import make_request

Message = scheduler_pb2.TokenOutput


def message(size: int = 0) -> Message:
    """Of `size` bytes, which is 0 or more than 2."""
    made = Message(embedding=b"x" * max(0, size - 2))
    assert made.ByteSize() == size
    return made


def test_bounds_are_what_they_were_measured_to_be() -> None:
    assert (module.MAX_UNTAKEN, module.MAX_UNTAKEN_BYTES, module.MAX_BACKLOG) == (1024, 32 * 2**20, 20_000)
    assert sinks.LOAD_PERIOD_NS == 50_000_000


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNTAKEN", 4)
    monkeypatch.setattr(module, "MAX_UNTAKEN_BYTES", 20)
    monkeypatch.setattr(module, "MAX_BACKLOG", 7)


def test_a_window_is_full_beyond_its_messages_and_free_again_at_half(small: None) -> None:
    told: list[int] = []
    outbox: Outbox[Message] = Outbox(on_room=lambda: told.append(1))
    for _ in range(4):
        outbox.put(message())
    assert not outbox.is_full
    outbox.acknowledge(2)
    assert told == [], "it was never full"
    for _ in range(3):
        outbox.put(message())
    assert outbox.is_full
    outbox.acknowledge(4)
    assert not outbox.is_full
    assert told == [], "three are not taken"
    outbox.acknowledge(4)
    assert told == []
    outbox.acknowledge(5)
    assert told == [1]
    outbox.acknowledge(7)
    outbox.acknowledge(9)
    assert told == [1], "once for each time that it was full"


def test_a_window_is_full_beyond_its_bytes(small: None) -> None:
    told: list[int] = []
    outbox: Outbox[Message] = Outbox(on_room=lambda: told.append(1))
    outbox.put(message(10))
    outbox.put(message(10))
    assert not outbox.is_full
    outbox.put(message(11))
    assert outbox.is_full
    outbox.acknowledge(1)
    assert outbox.is_full, "21 bytes"
    outbox.acknowledge(2)
    assert not outbox.is_full
    assert told == [], "11 bytes are more than half"
    outbox.acknowledge(3)
    assert told == [1]


async def read(outbox: Outbox[Message], indexes: list[int], count: int | None = None) -> None:
    async for one in outbox:
        indexes.append(one.index)
        if len(indexes) == count:
            break


async def taken(outbox: Outbox[Message], count: int | None = None) -> list[int]:
    indexes: list[int] = []
    await read(outbox, indexes, count)
    return indexes


async def test_messages_come_in_order_until_the_end(small: None) -> None:
    outbox: Outbox[Message] = Outbox()
    for index in range(3):
        outbox.put(Message(index=index))
    outbox.close()
    outbox.put(Message(index=9))
    assert await taken(outbox) == [0, 1, 2]


async def test_a_reader_that_never_acknowledges_has_taken_what_it_was_given(small: None) -> None:
    for is_acknowledged, is_full in ((False, False), (True, True)):
        outbox: Outbox[Message] = Outbox()
        outbox.is_acknowledged = is_acknowledged
        for index in range(6):
            outbox.put(Message(index=index))
        assert outbox.is_full
        assert await taken(outbox, 4) == [0, 1, 2, 3]
        assert outbox.is_full is is_full


async def test_an_error_comes_after_what_waits_and_the_first_one_counts() -> None:
    outbox: Outbox[Message] = Outbox()
    outbox.put(Message(index=5))
    outbox.close(PagodaError("first"))
    outbox.close(PagodaError("second"))
    indexes: list[int] = []
    with pytest.raises(PagodaError, match=r"^first$"):
        await read(outbox, indexes)
    assert indexes == [5]


async def test_a_reader_that_takes_nothing_is_cut_off(small: None) -> None:
    outbox: Outbox[Message] = Outbox()
    for index in range(7):
        outbox.put(Message(index=index))
    assert not outbox._is_closed
    outbox.put(Message(index=7))
    indexes: list[int] = []
    with pytest.raises(QueueFull, match=r"the reader is 7 messages behind"):
        await read(outbox, indexes)
    assert indexes == list(range(7))


def add_embedding(first: Message, second: Message) -> bool:
    """Joins messages of the same index."""
    if first.index != second.index:
        return False
    first.embedding += second.embedding
    return True


async def test_messages_beyond_the_window_are_joined_and_come_when_there_is_room() -> None:
    outbox: Outbox[Message] = Outbox(join=add_embedding)
    outbox.is_acknowledged, outbox.acknowledges_every = True, 1
    got: list[bytes] = []

    async def read_on() -> None:
        async for one in outbox:
            got.append(one.embedding)  # noqa: PERF401 (it is looked at before the end)

    reading = asyncio.create_task(read_on())
    for index, text in enumerate(b"abcdefg"):
        outbox.put(Message(index=index // 6, embedding=bytes([text])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert got == [b"a", b"b"], "two are on their way, and none was acknowledged"
    outbox.acknowledge(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == [b"a", b"b", b"cdef"], "g is of another kind"
    outbox.acknowledge(3)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == [b"a", b"b", b"cdef", b"g"]
    outbox.close()
    await reading


async def test_joined_messages_count_for_what_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNTAKEN", 12)
    told: list[int] = []
    outbox: Outbox[Message] = Outbox(on_room=lambda: told.append(1), join=add_embedding)
    outbox.is_acknowledged, outbox.acknowledges_every = True, 1
    reading = asyncio.create_task(taken(outbox, 7))
    await asyncio.sleep(0)
    for _ in range(13):
        assert not outbox.is_full
        outbox.put(Message(index=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert outbox.is_full, "2 on their way, then 3, 3, 3 and 2"
    outbox.acknowledge(3)
    assert not outbox.is_full
    assert told == [], "eight are more than half"
    for _ in range(3):
        await asyncio.sleep(0)
    outbox.acknowledge(4)
    assert told == [1]
    for _ in range(3):
        await asyncio.sleep(0)
    outbox.acknowledge(6)
    outbox.put(Message(index=2))
    assert await reading == [1] * 6 + [2]


async def test_messages_are_joined_while_the_connection_takes_none() -> None:
    outbox: Outbox[Message] = Outbox(join=add_embedding)
    outbox.is_acknowledged = True
    for _ in range(6):
        outbox.put(Message(index=1, embedding=b"a"))
    outbox.close()
    assert [one.embedding async for one in outbox] == [b"aaaa", b"aa"], "64 times four are a quarter of the window"


async def test_a_reader_that_does_not_acknowledge_gets_every_message() -> None:
    outbox: Outbox[Message] = Outbox(join=add_embedding)
    outbox.acknowledges_every = 1
    for _ in range(6):
        outbox.put(Message(index=1))
    outbox.close()
    assert await taken(outbox) == [1] * 6


async def test_what_waits_for_room_is_sent_at_the_end() -> None:
    outbox: Outbox[Message] = Outbox()
    outbox.is_acknowledged, outbox.acknowledges_every = True, 1
    for index in range(5):
        outbox.put(Message(index=index))
    outbox.close()
    assert await taken(outbox) == list(range(5))


async def test_a_reader_is_woken(small: None) -> None:
    outbox: Outbox[Message] = Outbox()
    reading = asyncio.create_task(taken(outbox))
    await asyncio.sleep(0)
    outbox.put(Message(index=1))
    await asyncio.sleep(0)
    outbox.put(Message(index=2))
    await asyncio.sleep(0)
    outbox.close()
    assert await reading == [1, 2]


def state_of(*, is_ready: bool = True, has_cores: bool = True, guesses: int = 0) -> SchedulerState:
    speculation = SpeculationCounters(21, 22, 23, [24, 25])
    counters = SimpleNamespace(
        prefix_cache_queries=5,
        prefix_cache_hits=6,
        num_preemptions=7,
        num_worker_losses=8,
        num_steps=9,
        speculation=speculation,
    )
    load = SimpleNamespace(
        num_running_reqs=1,
        num_waiting_reqs=2,
        num_used_blocks=3,
        num_total_blocks=4,
        counters=counters,
        silence_ms=10,
        num_groups=11,
    )
    speculative = SpeculativeConfig(num_speculative_tokens=guesses, method="ngram") if guesses else SpeculativeConfig()
    engine = SimpleNamespace(
        load=lambda: load,
        is_ready=is_ready,
        cores=[1] if has_cores else [],
        not_ready_reason="no worker",
        config=EngineConfig(cache=CacheConfig(block_size=32), speculative=speculative),
        announce=lambda: None,
    )
    groups: Any = SimpleNamespace(sleep_level=2, model_info=None)
    return SchedulerState(session_epoch=77, engine=engine, groups=groups)  # type: ignore[arg-type]  # all that is asked of it


def test_the_load_is_told_number_by_number() -> None:
    assert state_of().load() == types_pb2.EngineLoad(
        num_running_reqs=1,
        num_waiting_reqs=2,
        num_used_blocks=3,
        num_total_blocks=4,
        prefix_cache_queries=5,
        prefix_cache_hits=6,
        num_preemptions=7,
        num_worker_losses=8,
        num_steps=9,
        is_ready=True,
        silence_ms=10,
        num_groups=11,
        block_size=32,
    )


def test_an_engine_that_is_not_ready_says_why_and_how_deep_it_sleeps() -> None:
    load = state_of(is_ready=False, has_cores=False).load()
    assert (load.is_ready, load.not_ready_reason, load.sleep_level) == (False, "no worker", 2)
    load = state_of(is_ready=False).load()
    assert (load.not_ready_reason, load.sleep_level) == ("no worker", 0)


def test_drafts_are_told_where_there_may_be_some() -> None:
    assert not state_of().load().HasField("speculation")
    told = state_of(guesses=2).load().speculation
    assert (told.num_drafts, told.num_draft_tokens, told.num_accepted_tokens) == (21, 22, 23)
    assert list(told.num_accepted_tokens_per_pos) == [24, 25]


def test_a_request_is_kept_without_its_slots() -> None:
    submitted = scheduler_pb2.SubmitRequest(request_id="r", resume_key="key", tenant="t")
    submitted.slots.extend([3, 4])
    submitted.resume.SetInParent()
    origin = origin_of(submitted)
    assert origin is not None
    kept: Any = origin.message
    assert (origin.key, kept.request_id, kept.tenant) == ("key", "r", "t")
    assert (list(kept.slots), kept.HasField("resume")) == ([], False)
    assert list(submitted.slots) == [3, 4], "the message itself is left alone"
    assert origin_of(scheduler_pb2.SubmitRequest(request_id="r")) is None


def adopted(*, submitted: Any = None, **fields: Any) -> Any:
    request = make_request("r", 9)
    request.output_token_ids, request.first_cached_tokens = [4, 5], 6
    for name, value in fields.items():
        setattr(request, name, value)
    origin = origin_of(submitted or scheduler_pb2.SubmitRequest(request_id="r", resume_key="key"))
    open_request: Any = SimpleNamespace(origin=origin, sequences=[request])
    (sequence,) = adopted_to_proto(open_request).sequences
    return sequence


def test_an_adopter_gets_the_tokens_and_the_end() -> None:
    sequence = adopted()
    assert (sequence.num_cached_tokens, sequence.output_token_ids) == (6, token_ids_to_bytes([4, 5]))
    assert not sequence.finish_reason
    sequence = adopted(finish_reason="stop", stop_token_id=5)
    assert (sequence.finish_reason, sequence.stop_token_id) == (FINISH_NUMBERS["stop"], 5)
    sequence = adopted(finish_reason="length")
    assert sequence.finish_reason == FINISH_NUMBERS["length"]
    assert not sequence.HasField("stop_token_id")
    assert not adopted(finish_reason="error", error=PagodaError("no")).finish_reason
    assert not adopted(output_token_ids=[]).HasField("num_cached_tokens")


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs", "beam_search", "pooling"])
def test_what_cannot_be_told_again_begins_anew(field: str) -> None:
    submitted = scheduler_pb2.SubmitRequest(request_id="r", resume_key="key")
    if field in ("beam_search", "pooling"):
        getattr(submitted, field).SetInParent()
    else:
        setattr(submitted.sampling_params, field, 1)
    sequence = adopted(submitted=submitted, finish_reason="stop")
    assert (sequence.num_cached_tokens, sequence.output_token_ids) == (6, b"")
    assert not sequence.finish_reason
