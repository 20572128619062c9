"""Sequences whose reader does not keep up are parked: others get their slots and blocks, and they go on as if nothing
had been."""

import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_common.errors import QueueFull
from pagoda_scheduler.rpc import outbox
from pagoda_scheduler.rpc.outbox import Outbox
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_request, make_scheduler, run

MESSAGE = scheduler_pb2.SchedulerMessage(token_ids=b"0123")


def test_a_parked_sequence_gives_up_slot_and_blocks_and_goes_on_where_it_was() -> None:
    scheduler, worker = make_scheduler(max_num_seqs=1, enable_prefix_caching=False), PretendWorker()
    slow, quick = make_request("slow", 5, max_tokens=20), make_request("quick", 6, max_tokens=5)
    scheduler.add(slow)
    for _ in range(4):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(worker.execute(output))
    in_flight = scheduler.schedule()
    assert in_flight is not None
    scheduler.park(slow)
    assert scheduler.kv.pool.num_used_blocks == 0
    scheduler.update(worker.execute(in_flight))  # what was under way is still taken
    assert len(slow.output_token_ids) == 5
    assert not scheduler.has_unfinished_requests
    assert scheduler.schedule() is None
    scheduler.add(quick)
    run(scheduler, worker)
    assert quick.output_token_ids == expected_output(list(quick.prompt_token_ids), 5)
    assert len(slow.output_token_ids) == 5
    scheduler.unpark(slow)
    run(scheduler, worker)
    assert slow.output_token_ids == expected_output(list(slow.prompt_token_ids), 20)
    assert scheduler.kv.pool.num_used_blocks == 0


def test_a_sequence_may_be_unparked_while_its_last_step_is_in_flight() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    request = make_request("a", 5, max_tokens=20)
    scheduler.add(request)
    in_flight = [scheduler.schedule(), scheduler.schedule()]
    scheduler.park(request)
    scheduler.unpark(request)
    for output in in_flight:
        assert output is not None
        scheduler.update(worker.execute(output))
    run(scheduler, worker)
    assert request.output_token_ids == expected_output(list(request.prompt_token_ids), 20)


def test_a_parked_sequence_may_end_and_may_lose_its_worker() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    requests = [make_request(name, 5) for name in ("running", "waiting", "lost")]
    for request in requests[:1]:
        scheduler.add(request)
    scheduler.update(worker.execute(scheduler.schedule()))  # type: ignore[arg-type]
    for request in requests[1:]:
        scheduler.add(request)
    for request in requests:
        scheduler.park(request)
        scheduler.park(request)
    assert (list(scheduler.parked), len(scheduler.waiting), scheduler.running) == (requests, 0, [])
    for request in requests[:2]:
        scheduler.finish(request)
    assert scheduler.take_all() == requests[2:]
    assert not scheduler.parked
    scheduler.unpark(requests[2])  # it is not parked here any more
    assert len(scheduler.waiting) == 0


def test_what_waits_is_taken_out_but_for_requests_that_have_something_under_way() -> None:
    scheduler, worker = make_scheduler(max_num_seqs=1), PretendWorker()
    first, second = make_request("a", 5), make_request("a", 5, index=1)
    other = make_request("b", 6)
    for request in (first, second, other):
        scheduler.add(request)
    scheduler.update(worker.execute(scheduler.schedule()))  # type: ignore[arg-type]
    assert scheduler.take_waiting() == [other]
    run(scheduler, worker)
    assert first.is_finished
    assert second.is_finished
    assert not other.is_finished


def test_an_outbox_is_full_until_half_of_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_UNTAKEN", 4)
    heard: list[str] = []
    box: Outbox[scheduler_pb2.SchedulerMessage] = Outbox(on_room=lambda: heard.append("room"))
    for _ in range(4):
        box.put(MESSAGE)
    assert not box.is_full
    box.put(MESSAGE)
    assert box.is_full
    box.acknowledge(2)
    assert (box.is_full, heard) == (False, [])
    box.acknowledge(2)  # cumulative: nothing new
    box.acknowledge(3)
    assert heard == ["room"]
    box.acknowledge(99)
    assert heard == ["room"]


def test_an_outbox_is_full_by_bytes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_UNTAKEN_BYTES", 3 * MESSAGE.ByteSize())
    box: Outbox[scheduler_pb2.SchedulerMessage] = Outbox()
    for _ in range(4):
        box.put(MESSAGE)
    assert box.is_full


async def test_a_reader_that_does_not_acknowledge_takes_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_UNTAKEN", 4)
    heard: list[str] = []
    box: Outbox[scheduler_pb2.SchedulerMessage] = Outbox(on_room=lambda: heard.append("room"))
    for _ in range(6):
        box.put(MESSAGE)
    messages = aiter(box)
    for _ in range(4):
        await anext(messages)
    assert heard == []
    await anext(messages)
    assert heard == ["room"]


async def test_a_reader_that_makes_answers_and_takes_none_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_BACKLOG", 3)
    box: Outbox[scheduler_pb2.SchedulerMessage] = Outbox()
    for _ in range(9):
        box.put(MESSAGE)
    with pytest.raises(QueueFull, match="3 messages behind"):
        assert [message async for message in box] == [MESSAGE] * 3


async def test_what_a_reader_that_acknowledges_has_read_counts_until_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "MAX_UNTAKEN", 4)
    heard: list[str] = []
    box: Outbox[scheduler_pb2.SchedulerMessage] = Outbox(on_room=lambda: heard.append("room"))
    box.is_acknowledged = True
    for _ in range(6):
        box.put(MESSAGE)
    messages = aiter(box)
    for _ in range(6):
        await anext(messages)
    assert (box.is_full, heard) == (True, [])
    box.acknowledge(6)
    assert (box.is_full, heard) == (False, ["room"])


async def test_a_stream_ends_with_the_first_error_after_what_waits() -> None:
    box: Outbox[scheduler_pb2.SchedulerMessage] = Outbox()
    box.put(MESSAGE)
    box.close(QueueFull("first"))
    box.close(QueueFull("second"))
    box.close()
    box.put(MESSAGE)  # too late
    messages = aiter(box)
    assert await anext(messages) == MESSAGE
    with pytest.raises(QueueFull, match="first"):
        await anext(messages)
