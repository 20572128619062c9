"""A group that is to serve no more for a while: its sequences go the way of a lost group's, and no one is to blame."""

import asyncio

import pytest

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.errors import QueueFull
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.groups.group_orders import GroupOrders
from pagoda_scheduler.groups.hold import Hold
from pagoda_scheduler.kv.cache_group import CacheSizes

NEW = WeightsSource(model="new", version=2)
NEWER = WeightsSource(model="newer", version=3)


class Silent:
    """A worker that takes every step and answers none."""

    def __init__(self) -> None:
        self.sent: list[SchedulerOutput] = []

    def send(self, output: SchedulerOutput) -> None:
        self.sent.append(output)

    async def receive(self) -> ModelRunnerOutput:
        await asyncio.Event().wait()
        raise AssertionError


def make_engine(**scheduler: int) -> Engine:
    return Engine(config=EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(**scheduler)))


def add_core(engine: Engine, *, vocab_size: int | None = None) -> EngineCore:
    core = EngineCore(
        config=engine.config,
        executor=Silent(),
        sizes=CacheSizes(100),
        max_model_len=64,
        vocab_size=vocab_size,
        deliver=engine.deliver,
    )
    engine.add_core(core)
    return core


def make_request(name: str, output: list[int] | None = None) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[1, 2, 3, 4, 5],
        output_token_ids=output or [],
        sampling_params=SamplingParams(max_tokens=20, ignore_eos=True),
        max_model_len=64,
    )


async def test_sequences_in_flight_are_requeued_with_their_tokens_and_without_blame() -> None:
    engine = make_engine()
    core = add_core(engine)
    running, waiting = make_request("running", [7, 8]), make_request("waiting")
    engine.submit([running])
    core.step()
    engine.submit([waiting])
    assert running.status is RequestStatus.RUNNING
    engine.remove_core(core, "the model sleeps", is_fault=False)
    assert (running.status, running.num_computed_tokens, running.output_token_ids) == (RequestStatus.WAITING, 0, [7, 8])
    assert (running.num_crashes, engine.load().counters.num_worker_losses) == (0, 0)
    assert (engine.is_ready, engine.not_ready_reason) == (False, "the model sleeps")
    later = make_request("later")
    engine.submit([later])
    core = add_core(engine)
    assert list(core.scheduler.waiting) == [running, waiting, later]


async def test_a_sequence_that_no_other_group_can_compute_fails_alone() -> None:
    engine = make_engine()
    first = add_core(engine, vocab_size=100)
    requests = [make_request("known", [7, 8]), make_request("unknown", [7, 50])]
    engine.submit(requests[:1])
    engine.submit(requests[1:])
    second = add_core(engine, vocab_size=50)  # of another model
    engine.remove_core(first, "other weights come", is_fault=False)
    known, unknown = requests
    assert [request.request_id for request in second.scheduler.take_all()] == ["known"]
    assert (known.error, unknown.is_finished, unknown.finish_reason) == (None, True, "error")
    assert unknown.error is not None
    assert unknown.error.message == "output_token_ids has token 50, the vocabulary has 50"
    assert list(engine.requests) == ["known"]


async def test_another_group_takes_them_at_once_ahead_of_its_own_queue() -> None:
    engine = make_engine()
    first = add_core(engine)
    moved = make_request("moved", [7])
    engine.submit([moved])
    first.step()
    second = add_core(engine)
    engine.remove_core(first, "new weights", is_fault=False)
    assert list(second.scheduler.waiting) == [moved]
    assert engine.is_ready


async def test_a_loss_is_held_against_what_was_in_flight() -> None:
    engine = make_engine()
    core = add_core(engine)
    request = make_request("a")
    engine.submit([request])
    core.step()
    engine.remove_core(core, "the connection broke")
    assert (request.num_crashes, engine.load().counters.num_worker_losses) == (1, 1)


async def test_what_waits_for_a_group_is_bounded_but_not_what_comes_back() -> None:
    engine = make_engine(max_num_queued_reqs=1, max_num_queued_tokens=100)
    engine.submit([make_request("first")])
    with pytest.raises(QueueFull, match="1 sequences are waiting, max_num_queued_reqs is 1"):
        engine.submit([make_request("second")])
    again = make_request("again", [9])
    again.attempt = 2
    engine.submit([again])
    assert engine.load().num_waiting_reqs == 2


async def test_a_hold_waits_for_rest_and_ends() -> None:
    hold, log = Hold(), []

    async def group() -> None:
        await hold.wait_wanted()
        log.append("stopped")
        await hold.rest()
        log.append("serves")

    task = asyncio.create_task(group())
    await asyncio.sleep(0)
    hold.want("why")
    await hold.wait_at_rest()
    assert (log, hold.is_wanted, hold.reason) == (["stopped"], True, "why")
    hold.end()
    await task
    assert (log, hold.is_wanted) == (["stopped", "serves"], False)


def test_orders_for_one_group_go_before_those_for_all() -> None:
    orders = GroupOrders()
    orders.sleep(1)
    orders.sleep(0, 3)
    assert [orders.sleep_level(number) for number in (0, 3, 9)] == [1, 0, 1]
    orders.sleep(0)
    assert orders.sleep_level(0) == 0
    orders.use_weights(NEW)
    orders.use_weights(NEWER, 1)
    assert [orders.weights(number) for number in (0, 1)] == [NEW, NEWER]
    before = orders.weights_orders()
    orders.use_weights(NEWER)
    assert orders.weights(0) == NEWER
    orders.restore_weights_orders(before)
    assert [orders.weights(number) for number in (0, 1)] == [NEW, NEWER]


def test_a_worker_tells_what_a_scheduler_before_us_has_asked_once() -> None:
    orders = GroupOrders()
    orders.learn(0, incarnation=11, sleep_level=2, weights=NEW)
    assert (orders.sleep_level(0), orders.sleep_level(1), orders.weights(1)) == (2, 0, NEW)
    orders.sleep(0)
    orders.learn(0, incarnation=11, sleep_level=2, weights=NEWER)
    assert (orders.sleep_level(0), orders.weights(0)) == (0, NEW)
    orders.learn(1, incarnation=12, sleep_level=0, weights=WeightsSource(model="old", version=1))
    assert orders.weights(1) == NEW
    orders.learn(2, incarnation=13, sleep_level=0, weights=WeightsSource(model="x", version=9, is_for_one_group=True))
    assert [orders.weights(number).model for number in (0, 2)] == ["new", "x"]  # type: ignore[union-attr]  # none is None
