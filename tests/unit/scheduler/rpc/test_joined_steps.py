"""Steps for one frontend that are sent as one message: nothing is lost, and what must be apart stays apart."""

from typing import Any

import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_common.engine.convert import column, token_ids_to_bytes
from pagoda_scheduler.rpc import joined_steps
from pagoda_scheduler.rpc.joined_steps import join_steps

Message = scheduler_pb2.SchedulerMessage


def step(number: int, rows: list[tuple[int, int, int]], **fields: Any) -> Message:
    """Rows are slot, offset, token."""
    slots, offsets, tokens = (list(each) for each in zip(*rows, strict=True)) if rows else ([], [], [])
    message = Message(session_epoch=7, step=number, token_ids=token_ids_to_bytes(tokens), **fields)
    message.slots, message.offsets = column(slots, "<u4"), column(offsets, "<u4")
    return message


def test_tokens_ends_and_admissions_follow_each_other() -> None:
    first = step(5, [(1, 0, 100), (2, 9, 200)])
    first.admitted.add(slot=1, num_cached_tokens=3)
    second = step(6, [(1, 1, 101), (3, 0, 300)])
    second.admitted.add(slot=3)
    second.finished.add(slot=1, num_output_tokens=2)
    assert join_steps(first, second)
    expected = step(6, [(1, 0, 100), (2, 9, 200), (1, 1, 101), (3, 0, 300)])
    expected.admitted.add(slot=1, num_cached_tokens=3)
    expected.admitted.add(slot=3)
    expected.finished.add(slot=1, num_output_tokens=2)
    assert first == expected


def test_the_last_load_counts_and_a_message_outside_of_a_step_keeps_the_step() -> None:
    first = step(5, [(1, 0, 100)])
    first.load.num_running_reqs = 4
    assert join_steps(first, step(6, [(1, 1, 101)]))
    assert first.load.num_running_reqs == 4
    announcement = Message(session_epoch=7)
    announcement.load.num_waiting_reqs = 2
    assert join_steps(first, announcement)
    assert (first.step, first.load.num_running_reqs, first.load.num_waiting_reqs) == (6, 0, 2)


@pytest.mark.parametrize("name", ["hello", "model_info", "loras", "logprobs", "prompt_logprobs", "rejected", "counts"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_no_plain_step_stays_apart(name: str, is_first: bool) -> None:
    plain, other = step(5, [(1, 0, 100)]), step(6, [(1, 1, 101)])
    if name == "counts":
        other.counts = b"\1"
    elif name in ("prompt_logprobs", "rejected"):
        getattr(other, name).add()
    else:
        getattr(other, name).SetInParent()
    first, second = (other, plain) if is_first else (plain, other)
    before = Message.FromString(first.SerializeToString())
    assert not join_steps(first, second)
    assert first == before


def test_a_large_message_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_steps, "MAX_JOINED_BYTES", 100)
    first, num_joined = step(1, [(1, 0, 100)]), 0
    while join_steps(first, step(2, [(1, num_joined + 1, 100)])):
        num_joined += 1
    assert 100 < first.ByteSize() <= 100 + 3 * 4 + 3
