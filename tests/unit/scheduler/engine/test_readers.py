"""Slow readers: what each of two is owed, with a group that comes, goes and steps meanwhile."""

import asyncio

from pagoda_common.config.engine_config import CacheConfig, EngineConfig
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.kv.cache_group import CacheSizes
from pagoda_scheduler.kv.kv_events import BlockStored, KVEventLog
from tests.unit.scheduler.engine.test_open_requests import Notes, submit
from tests.unit.scheduler.stories import PretendWorker


class Worker:
    """A group whose answers the test releases."""

    def __init__(self) -> None:
        self.pretend = PretendWorker()
        self.sent: list[SchedulerOutput] = []

    def send(self, output: SchedulerOutput) -> None:
        self.sent.append(output)

    async def receive(self) -> ModelRunnerOutput:
        await asyncio.Event().wait()
        raise AssertionError


def add_core(engine: Engine) -> tuple[EngineCore, Worker]:
    worker = Worker()
    core = EngineCore(
        config=engine.config, executor=worker, sizes=CacheSizes(100), max_model_len=64, deliver=engine.deliver
    )
    engine.add_core(core)
    return core, worker


def step(core: EngineCore, worker: Worker) -> None:
    """One step from its sending to its news."""
    output = core.scheduler.schedule()
    assert output is not None
    engine_result = core.scheduler.update(worker.pretend.execute(output))
    core._deliver(engine_result)


async def test_only_the_slow_readers_sequences_are_parked_and_what_comes_for_it_as_well() -> None:
    engine = Engine(config=EngineConfig(cache=CacheConfig(block_size=4)))
    slow, quick = Notes(), Notes()
    core, worker = add_core(engine)
    first, other = submit(engine, slow, "first"), submit(engine, quick, "other")
    slow.is_behind = True
    step(core, worker)
    assert list(core.scheduler.parked) == [first]
    assert core.scheduler.running == [other]
    second = submit(engine, slow, "second")
    assert list(core.scheduler.parked) == [first, second]
    assert engine.load().num_waiting_reqs == 2
    engine.unpark(quick)
    assert len(core.scheduler.parked) == 2
    slow.is_behind = False
    engine.unpark(slow)
    assert not core.scheduler.parked
    assert list(core.scheduler.waiting) == [first, second]


async def test_a_reader_that_is_slow_again_is_parked_again() -> None:
    engine, slow = Engine(config=EngineConfig(cache=CacheConfig(block_size=4))), Notes()
    core, worker = add_core(engine)
    request = submit(engine, slow, "a")
    for _ in range(2):
        slow.is_behind = True
        step(core, worker)
        assert list(core.scheduler.parked) == [request]
        slow.is_behind = False
        engine.unpark(slow)
        assert not core.scheduler.parked


async def test_a_sequence_of_a_slow_reader_is_parked_in_its_next_group_too() -> None:
    engine, slow = Engine(config=EngineConfig(cache=CacheConfig(block_size=4))), Notes()
    core, worker = add_core(engine)
    request = submit(engine, slow, "a")
    slow.is_behind = True
    step(core, worker)
    engine.remove_core(core, "lost")
    core, worker = add_core(engine)
    assert list(core.scheduler.parked) == [request]
    assert request.output_token_ids


async def test_a_lost_group_takes_its_cached_blocks_out_of_the_events() -> None:
    engine, sink = Engine(config=EngineConfig(cache=CacheConfig(block_size=4))), Notes()
    engine.kv_events = log = KVEventLog()
    core, worker = add_core(engine)
    submit(engine, sink, "a")
    step(core, worker)
    assert [type(event) for event in log.snapshot()] == [BlockStored]
    engine.remove_core(core, "lost")
    assert log.snapshot() == []


async def test_counters_outlive_their_group_and_only_faults_count_as_losses() -> None:
    engine, sink = Engine(config=EngineConfig(cache=CacheConfig(block_size=4))), Notes()
    for is_fault in (True, False):
        core, worker = add_core(engine)
        submit(engine, sink, f"request-{is_fault}")
        step(core, worker)
        core.num_steps += 5
        engine.remove_core(core, "lost", is_fault=is_fault)
        engine.remove_core(core, "lost")  # nothing, the second time
        engine.abort(list(engine.requests))
    counters = engine.load().counters
    assert (counters.num_steps, counters.num_worker_losses, counters.prefix_cache_queries) == (10, 1, 10)
    assert (engine.load().num_groups, engine.not_ready_reason) == (0, "lost")


async def test_a_retired_group_finishes_what_runs_and_its_queue_goes_elsewhere() -> None:
    engine, sink = Engine(config=EngineConfig(cache=CacheConfig(block_size=4))), Notes()
    core, worker = add_core(engine)
    running = submit(engine, sink, "running")
    step(core, worker)
    waiting = submit(engine, sink, "waiting")
    engine.retire_core(core, "it leaves")
    assert (core.scheduler.running, len(core.scheduler.waiting), engine.is_ready) == ([running], 0, False)
    assert engine.not_ready_reason == "it leaves"
    assert (engine.load().num_running_reqs, engine.load().num_waiting_reqs, engine.load().num_groups) == (1, 1, 0)
    other, _ = add_core(engine)
    assert (list(other.scheduler.waiting), engine.is_ready, engine.not_ready_reason) == ([waiting], True, "")
    engine.remove_core(core, "gone", is_fault=False)
    assert list(other.scheduler.waiting) == [running, waiting]
    assert engine.not_ready_reason == ""


async def test_what_is_aborted_or_out_of_time_leaves_its_group_at_once() -> None:
    engine, sink = Engine(config=EngineConfig(cache=CacheConfig(block_size=4))), Notes()
    core, worker = add_core(engine)
    running = [submit(engine, sink, name) for name in "abc"]
    step(core, worker)
    waiting = submit(engine, sink, "waiting")
    engine.abort(["a", "waiting"])
    engine.stop([running[1]])
    assert (core.scheduler.running, len(core.scheduler.waiting)) == ([running[2]], 0)
    engine._expire("c", 5.0)
    assert (core.scheduler.running, core.scheduler.kv.pool.num_used_blocks) == ([], 0)
    assert [request.finish_reason for request in (*running, waiting)] == ["abort", "stop", "error", "abort"]
    assert engine.requests == {}


async def test_a_group_that_leaves_takes_its_cached_blocks_out_of_the_events_at_once() -> None:
    engine, sink = Engine(config=EngineConfig(cache=CacheConfig(block_size=4))), Notes()
    engine.kv_events = log = KVEventLog()
    core, worker = add_core(engine)
    submit(engine, sink, "a")
    step(core, worker)
    assert len(log.snapshot()) == 1
    engine.retire_core(core, "it leaves")
    assert log.snapshot() == [], "what comes next goes elsewhere"
    step(core, worker)
    assert log.snapshot() == []
