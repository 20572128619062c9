"""What operators ask of the scheduler, and what it tells of itself."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import NotFound
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.engine.load import Counters, Load
from pagoda_scheduler.engine.open_requests import Origin
from pagoda_scheduler.groups.weights_control import Reloaded, Slept, Woken
from pagoda_scheduler.groups.worker_group import Rank, WorkerGroup
from pagoda_scheduler.rpc.sinks import SessionSink
from tests.unit.scheduler.engine.test_open_requests import Notes
from tests.unit.scheduler.rpc.served_engine import Scheduler, sent, submit
from tests.unit.scheduler.stories import make_request

CALL = scheduler_pb2.SchedulerMessage()  # any message: no handler below reads its context


@pytest.fixture
async def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
async def adapting() -> Scheduler:
    return Scheduler(lora=LoraConfig(enable_lora=True, max_loras=2, max_cpu_loras=2))


# Operations.


async def test_calls_about_the_whole_engine(scheduler: Scheduler) -> None:
    core = scheduler.add_core()
    sink = Notes()
    scheduler.engine.sinks.add(sink)
    sequences = [make_request("a", 9, index=index, sink=sink) for index in range(2)]
    sequences[1].output_token_ids, sequences[1].num_tokens = [7], 10
    scheduler.engine.submit(sequences)
    core.step()
    request = scheduler_pb2.DrainRequest(timeout_s=0.0)
    assert (await scheduler.servicer.Drain(request, CALL)).num_unfinished == 2
    metrics = await scheduler.servicer.GetMetrics(scheduler_pb2.GetMetricsRequest(), CALL)
    assert metrics.text == b"metrics"
    reset = await scheduler.servicer.ResetPrefixCache(scheduler_pb2.ResetPrefixCacheRequest(), CALL)
    assert reset.num_blocks == 2
    identity = scheduler_pb2.WorkerIdentity(address="127.0.0.1:1", incarnation=4)
    scheduler.groups.groups[5] = WorkerGroup(5, 1, {0: Rank(identity, address="x")}, state="sleeping", sleep_level=2)
    state = await scheduler.servicer.GetState(scheduler_pb2.GetStateRequest(), CALL)
    assert state.load.num_total_blocks == 100
    assert [(each.request_id, each.index, each.status) for each in state.sequences] == [
        ("a", 0, "running"),
        ("a", 1, "running"),
    ]
    first, second = state.sequences
    assert (first.num_prompt_tokens, first.num_output_tokens, first.num_blocks) == (9, 0, 3)
    assert (second.num_output_tokens, second.num_computed_tokens) == (1, sequences[1].num_computed_tokens)
    assert first.num_computed_tokens == sequences[0].num_computed_tokens > 0
    (worker,) = state.workers
    assert (worker.identity, worker.state, worker.sleep_level) == (identity, "sleeping", 2)
    scheduler.engine.stop([sequences[0]])
    state = await scheduler.servicer.GetState(scheduler_pb2.GetStateRequest(), CALL)
    assert [each.index for each in state.sequences] == [1]
    await scheduler.servicer.Abort(scheduler_pb2.AbortRequest(request_ids=["a"]), CALL)
    assert (sequences[1].finish_reason, scheduler.engine.requests) == ("abort", {})


async def test_a_key_without_requests_is_not_found(scheduler: Scheduler) -> None:
    scheduler.engine.submit([make_request("a", 5)], origin=Origin("key", submit("a")))
    adopted = await scheduler.servicer.Adopt(scheduler_pb2.AdoptRequest(resume_key="key"), CALL)
    assert [each.submitted.request_id for each in adopted.requests] == ["a"]
    with pytest.raises(NotFound, match="resume_key 'other' is unknown, or its lease is over") as caught:
        await scheduler.servicer.Adopt(scheduler_pb2.AdoptRequest(resume_key="other"), CALL)
    assert caught.value.field == "resume_key"


class Control:
    """Notes what is asked of the weights."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def sleep(self, **given: Any) -> Slept:
        self.asked.append(("sleep", given))
        return Slept(num_groups=2, freed_bytes=3, seconds=4.5)

    async def wake_up(self, **given: Any) -> Woken:
        given["tags"] = list(given["tags"])
        self.asked.append(("wake_up", given))
        return Woken(num_groups=2, seconds=4.5)

    async def reload(self, **given: Any) -> Reloaded:
        self.asked.append(("reload", given))
        return Reloaded(num_groups=2, seconds=4.5, pause_s=1.5)


async def test_sleep_waking_and_other_weights_are_asked_for_with_every_field(scheduler: Scheduler) -> None:
    control = Control()
    scheduler.servicer._weights = cast("Any", control)
    servicer = scheduler.servicer
    for sleep in (
        scheduler_pb2.SleepRequest(),
        scheduler_pb2.SleepRequest(level=2, group=0, mode=scheduler_pb2.SLEEP_MODE_ABORT),
    ):
        slept = await servicer.Sleep(sleep, CALL)
        assert (slept.num_groups, slept.freed_bytes, slept.seconds) == (2, 3, 4.5)
    for wake in (scheduler_pb2.WakeUpRequest(), scheduler_pb2.WakeUpRequest(tags=["weights"], group=0)):
        woken = await servicer.WakeUp(wake, CALL)
        assert (woken.num_groups, woken.seconds) == (2, 4.5)
    for reload in (
        scheduler_pb2.ReloadWeightsRequest(model="m"),
        scheduler_pb2.ReloadWeightsRequest(model="m", revision="r", group=0),
    ):
        reloaded = await servicer.ReloadWeights(reload, CALL)
        assert (reloaded.num_groups, reloaded.seconds, reloaded.pause_s) == (2, 4.5, 1.5)
    assert control.asked == [
        ("sleep", {"level": 1, "number": None, "is_abort": False}),
        ("sleep", {"level": 2, "number": 0, "is_abort": True}),
        ("wake_up", {"tags": [], "number": None}),
        ("wake_up", {"tags": ["weights"], "number": 0}),
        ("reload", {"model": "m", "revision": None, "number": None}),
        ("reload", {"model": "m", "revision": "r", "number": 0}),
    ]


async def test_each_group_says_how_deep_it_sleeps(scheduler: Scheduler) -> None:
    answer = await scheduler.servicer.IsSleeping(scheduler_pb2.IsSleepingRequest(), CALL)
    assert (answer.is_sleeping, answer.level, len(answer.groups)) == (False, 0, 0)
    for number, level in ((4, 2), (1, 0), (2, 1)):
        scheduler.groups.groups[number] = WorkerGroup(number, 1, sleep_level=level)
    answer = await scheduler.servicer.IsSleeping(scheduler_pb2.IsSleepingRequest(), CALL)
    assert (answer.is_sleeping, answer.level) == (True, 1)
    assert [(each.group, each.level) for each in answer.groups] == [(1, 0), (2, 1), (4, 2)]


async def test_a_worker_that_registers_is_told_whose_it_is(scheduler: Scheduler) -> None:
    async def messages() -> AsyncIterator[scheduler_pb2.WorkerRegistration]:
        return
        yield

    (answer,) = [each async for each in scheduler.servicer.RegisterWorker(messages(), CALL)]
    assert (answer.session_epoch, answer.can_leave) == (7, True)


# What the scheduler tells of itself.


@pytest.mark.parametrize("speculates", [True, False])
async def test_every_part_of_the_load_is_told(speculates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=2)} if speculates else {}
    scheduler = Scheduler(**more, scheduler=SchedulerConfig())
    counters = Counters(1, 2, 3, 4, 5)
    counters.speculation.count(2, 1)
    load = Load(
        num_running_reqs=11,
        num_waiting_reqs=12,
        num_used_blocks=13,
        num_total_blocks=14,
        silence_ms=15,
        num_groups=16,
        counters=counters,
    )
    monkeypatch.setattr(scheduler.engine, "load", lambda: load)
    scheduler.groups.groups[0] = WorkerGroup(0, 1, sleep_level=2)
    told = scheduler.state.load()
    assert (told.num_running_reqs, told.num_waiting_reqs, told.num_used_blocks, told.num_total_blocks) == (
        11,
        12,
        13,
        14,
    )
    assert (told.silence_ms, told.num_groups, told.block_size, told.sleep_level) == (15, 16, 4, 2)
    assert (told.num_steps, told.prefix_cache_queries, told.prefix_cache_hits) == (1, 2, 3)
    assert (told.num_preemptions, told.num_worker_losses) == (4, 5)
    assert (told.is_ready, told.not_ready_reason) == (False, "no worker has registered yet")
    assert told.HasField("speculation") is speculates
    if speculates:
        drafts = told.speculation
        assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (1, 2, 1)
        assert list(drafts.num_accepted_tokens_per_pos) == [1, 0]
    scheduler.add_core()
    told = scheduler.state.load()
    assert (told.is_ready, told.not_ready_reason, told.sleep_level) == (True, "", 0)
    scheduler.engine.is_draining = True
    scheduler.engine.not_ready_reason = "draining"
    told = scheduler.state.load()
    assert (told.is_ready, told.not_ready_reason) == (False, "draining")


async def test_the_list_of_adapters_is_told_anew_when_it_changes(scheduler: Scheduler) -> None:
    assert scheduler.state.loras is None
    adapting = Scheduler(lora=LoraConfig(enable_lora=True, lora_resolver_dir="/adapters"))
    sink = adapting.session()
    sink.hello("1.2")
    sink.announce()
    adapting.state.adapters.put(LoraAdapter(name="sql", path="/sql", version=5))
    sink.announce()
    told = [message.loras for message in sent(sink) if message.HasField("loras")]
    assert [[adapter.name for adapter in each.adapters] for each in told] == [[], ["sql"]]
    assert [(each.session_epoch, each.has_resolver) for each in told] == [(7, True), (7, True)]
    assert adapting.engine._readers._announcement is not None, "every frontend hears of it soon"
    adapting.engine._readers._announcement.cancel()
    assert not Scheduler(lora=LoraConfig(enable_lora=True)).state.loras.has_resolver  # type: ignore[union-attr]  # it is on


async def test_news_for_a_frontend_that_is_behind_are_told_when_it_has_caught_up(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_scheduler.rpc.outbox.MAX_UNTAKEN", 2)
    heard: list[SessionSink] = []
    sink = SessionSink(state=scheduler.state, on_room=heard.append)
    sink.outbox.is_acknowledged = True
    for _ in range(3):
        sink.announce()
    assert (sink.is_behind, len(sent(sink))) == (True, 3)
    sink.announce()
    sink.announce()
    assert len(sent(sink)) == 3
    sink.outbox.acknowledge(2)
    assert (heard, len(sent(sink))) == ([sink], 4)
    assert not sink.is_behind
    sink.outbox.acknowledge(4)
    sink.announce()
    assert (len(sent(sink)), heard) == (5, [sink])
