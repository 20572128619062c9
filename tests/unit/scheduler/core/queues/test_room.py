"""Who gives way when blocks run out."""

from typing import Any

from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.room import Room
from pagoda_scheduler.core.turns import TURN
from tests.unit.scheduler.stories import make_request


def make_room(running: list[Request]) -> Room:
    unused: Any = None
    return Room(
        config=SchedulerConfig(max_num_seqs=64),
        waiting=unused,
        running=running,
        has_place=unused,
        is_prepared=unused,
        preempt=unused,
        num_blocks=1000,
    )


def of_call(name: str, number: int) -> list[Request]:
    requests = [make_request(f"{name}{place}", 5) for place in range(number)]
    for request in requests:
        request.group = name
    return requests


def test_a_large_call_gives_way_before_a_stream_that_was_admitted_last() -> None:
    large, stream = of_call("large", 40), of_call("stream", 1)
    assert make_room([*large, *stream]).victim is large[-1]


def test_without_a_large_call_the_last_admitted_gives_way() -> None:
    small, stream = of_call("small", TURN), of_call("stream", 1)
    assert make_room([*small, *stream]).victim is stream[0]


def test_large_calls_within_their_shares_take_nothing_from_each_other() -> None:
    one, other, stream = of_call("one", 20), of_call("other", 20), of_call("stream", 1)
    assert make_room([*one, *other, *stream]).victim is stream[0]
