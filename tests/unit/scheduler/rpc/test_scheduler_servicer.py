"""SchedulerServicer without a server: what each call hands to the engine, and every field of what it answers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.errors import Code, InvalidRequest, ModelLoadError, NotFound, NotReady, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.engine.load import Counters, Load
from pagoda_scheduler.engine.open_requests import Origin
from pagoda_scheduler.groups.weights_control import Reloaded, Slept, Woken
from pagoda_scheduler.groups.worker_group import Rank, WorkerGroup
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.kv.cache_group import CacheSizes
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from pagoda_scheduler.rpc.servicer import SchedulerServicer
from pagoda_scheduler.rpc.sinks import SessionSink
from tests.unit.scheduler.engine.test_engine_core import Group
from tests.unit.scheduler.engine.test_open_requests import Notes
from tests.unit.scheduler.stories import make_request

CALL = scheduler_pb2.SchedulerMessage()  # any message: no handler below reads its context


class Context:
    """What a handler asks of a call."""

    def __init__(self, remaining_s: float | None = None, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._remaining_s = remaining_s
        self._metadata = metadata

    def time_remaining(self) -> float | None:
        return self._remaining_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


class Scheduler:
    """A servicer over an engine, and all of its parts."""

    def __init__(self, **config: Any) -> None:
        config.setdefault("cache", CacheConfig(block_size=4))
        self.config = EngineConfig(**config)
        self.engine = Engine(config=self.config)
        self.groups = WorkerGroups(config=self.config, engine=self.engine, session_epoch=7)
        self.state = SchedulerState(session_epoch=7, engine=self.engine, groups=self.groups)
        self.servicer = SchedulerServicer(
            engine=self.engine, groups=self.groups, state=self.state, version="1.2", render_metrics=lambda: b"metrics"
        )

    def add_core(self, **more: Any) -> EngineCore:
        core = EngineCore(
            config=self.config,
            executor=more.pop("group", Group()),
            sizes=CacheSizes(100),
            max_model_len=64,
            deliver=self.engine.deliver,
            **more,
        )
        self.engine.add_core(core)
        return core

    def session(self) -> SessionSink:
        sink = SessionSink(state=self.state, on_room=self.engine.unpark)
        self.engine.sinks.add(sink)
        return sink


@pytest.fixture
async def scheduler() -> Scheduler:
    return Scheduler()


def submit(name: str, **more: Any) -> scheduler_pb2.SubmitRequest:
    fields: dict[str, Any] = {
        "request_id": name,
        "slots": [3],
        "prompt_token_ids": token_ids_to_bytes([1, 2, 3, 4, 5]),
        "sampling_params": types_pb2.SamplingParams(n=1, max_tokens=4, seed=1),
    }
    return scheduler_pb2.SubmitRequest(**{**fields, **more})


def sent(sink: SessionSink) -> list[scheduler_pb2.SchedulerMessage]:
    """Messages on their way."""
    return list(sink.outbox._messages)


# Sessions.


async def test_a_submitted_request_is_open_with_its_time_its_key_and_its_slot(scheduler: Scheduler) -> None:
    sink = scheduler.session()
    message = submit("a", timeout_s=9.0, resume_key="key", attempt=2)
    scheduler.servicer._take(scheduler_pb2.FrontendMessage(submit=message), sink)
    open_request = scheduler.engine.requests["a"]
    assert open_request.origin is not None
    assert (open_request.attempt, open_request.origin.key) == (2, "key")
    assert sink.sequences == {3: open_request.sequences[0]}
    assert [entry[3] for entry in scheduler.engine._open._deadlines._heap] == [9.0]
    assert sent(sink) == []


async def test_a_request_that_is_refused_says_so_and_is_not_open(scheduler: Scheduler) -> None:
    sink = scheduler.session()
    scheduler.servicer._take(scheduler_pb2.FrontendMessage(submit=submit("a", prompt_token_ids=b"")), sink)
    (message,) = sent(sink)
    (rejected,) = message.rejected
    assert (rejected.request_id, rejected.error.field) == ("a", "prompt_token_ids")
    assert (sink.sequences, scheduler.engine.requests) == ({}, {})


async def test_sequences_that_had_ended_have_no_slot(scheduler: Scheduler) -> None:
    sink = scheduler.session()
    message = submit("a", slots=[3, 8], sampling_params=types_pb2.SamplingParams(n=2, max_tokens=4, seed=1))
    message.resume.sequences.add(is_finished=True, output_token_ids=token_ids_to_bytes([9]))
    message.resume.sequences.add(output_token_ids=token_ids_to_bytes([9]))
    scheduler.servicer._take(scheduler_pb2.FrontendMessage(submit=message), sink)
    assert list(sink.sequences) == [8]


async def test_a_frontend_ends_its_own_sequences_by_slot_and_requests_by_id(scheduler: Scheduler) -> None:
    sink, other = scheduler.session(), scheduler.session()
    for name, slot in (("a", 3), ("b", 4), ("c", 5), ("d", 6)):
        message = submit(name, slots=[slot], resume_key="key")
        scheduler.servicer._take(scheduler_pb2.FrontendMessage(submit=message), sink)
    requests = {name: open_request.sequences[0] for name, open_request in scheduler.engine.requests.items()}
    stop = scheduler_pb2.FrontendMessage()
    stop.stop.slots.extend([4, 99])
    scheduler.servicer._take(stop, other)
    assert not requests["b"].is_finished, "another frontend's slot"
    scheduler.servicer._take(stop, sink)
    abort = scheduler_pb2.FrontendMessage()
    abort.abort.request_ids.extend(["c", "unknown"])
    scheduler.servicer._take(abort, sink)
    assert [requests[name].finish_reason for name in "abcd"] == [None, "stop", "abort", None]
    assert list(scheduler.engine.requests) == ["a", "b", "d"], "what has ended is kept for who adopts it"
    release = scheduler_pb2.FrontendMessage()
    release.release.request_ids.extend(["b", "d", "unknown"])
    scheduler.servicer._take(release, sink)
    assert list(scheduler.engine.requests) == ["a", "d"]


async def test_a_hello_says_whether_the_frontend_acknowledges(scheduler: Scheduler) -> None:
    sink = scheduler.session()
    for acknowledges in (True, False):
        message = scheduler_pb2.FrontendMessage()
        message.hello.acknowledges = acknowledges
        scheduler.servicer._take(message, sink)
        assert sink.outbox.is_acknowledged is acknowledges
    for _ in range(3):
        sink.outbox.put(scheduler_pb2.SchedulerMessage())
    message = scheduler_pb2.FrontendMessage()
    message.acknowledgement.num_messages = 2
    scheduler.servicer._take(message, sink)
    assert len(sink.outbox._untaken) == 1


@pytest.mark.parametrize(("epoch", "is_learnt"), [(6, True), (7, False)])
async def test_adapters_of_an_earlier_scheduler_are_learnt_and_our_own_list_is_not(epoch: int, is_learnt: bool) -> None:
    scheduler = Scheduler(lora=LoraConfig(enable_lora=True))
    message = scheduler_pb2.FrontendMessage()
    message.hello.loras.session_epoch = epoch
    message.hello.loras.adapters.add(name="sql", path="/sql", version=4)
    scheduler.servicer._take(message, scheduler.session())
    assert [adapter.name for adapter in scheduler.state.adapters.listed()] == (["sql"] if is_learnt else [])


async def test_an_unknown_message_can_be_done_without(scheduler: Scheduler) -> None:
    scheduler.servicer._take(scheduler_pb2.FrontendMessage(), scheduler.session())
    batch = scheduler_pb2.FrontendMessage()
    batch.batch.messages.add()
    with pytest.raises(InvalidRequest, match="unexpected message batch"):
        scheduler.servicer._take(batch, scheduler.session())


async def test_a_session_greets_takes_batches_and_ends_with_what_it_had_open(scheduler: Scheduler) -> None:
    gate = asyncio.Event()

    async def messages() -> AsyncIterator[scheduler_pb2.FrontendMessage]:
        batch = scheduler_pb2.FrontendMessage()
        batch.batch.messages.add(submit=submit("a"))
        batch.batch.messages.add(submit=submit("b", slots=[4]))
        yield batch
        await gate.wait()

    stream = aiter(scheduler.servicer.Session(messages(), CALL))
    hello = await anext(stream)
    assert (hello.hello.version, hello.session_epoch) == ("1.2", 7)
    await asyncio.sleep(0)
    assert list(scheduler.engine.requests) == ["a", "b"]
    assert len(scheduler.engine.sinks) == 1
    gate.set()
    assert [message async for message in stream] == []
    assert (scheduler.engine.requests, scheduler.engine.sinks) == ({}, set())


async def test_a_session_with_a_wrong_message_ends_with_the_error(scheduler: Scheduler) -> None:
    async def messages() -> AsyncIterator[scheduler_pb2.FrontendMessage]:
        batch = scheduler_pb2.FrontendMessage()
        batch.batch.messages.add().batch.SetInParent()
        yield batch

    with pytest.raises(InvalidRequest, match="unexpected message"):
        _ = [message async for message in scheduler.servicer.Session(messages(), CALL)]


# Streams of one request.


async def test_a_stream_ends_with_its_request_and_frees_it_when_it_is_left(scheduler: Scheduler) -> None:
    core = scheduler.add_core()
    stream = aiter(scheduler.servicer.Generate(submit("a"), Context(5.0)))
    next_output = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert list(scheduler.engine.requests) == ["a"]
    assert scheduler.engine.requests["a"].origin is None
    assert [entry[3] for entry in scheduler.engine._open._deadlines._heap] == [5.0]
    with pytest.raises(InvalidRequest, match="request_id 'a' is in use"):
        await anext(aiter(scheduler.servicer.Generate(submit("a"), Context())))
    next_output.cancel()
    await asyncio.wait([next_output])
    assert (scheduler.engine.requests, scheduler.engine.sinks, core.scheduler.has_unfinished_requests) == (
        {},
        set(),
        False,
    )


@pytest.mark.parametrize(
    ("timeout_s", "remaining_s", "limits"), [(3.0, 9.0, [3.0]), (0.0, 9.0, [9.0]), (0.0, None, []), (3.0, None, [3.0])]
)
async def test_the_time_of_a_stream_is_the_requests_or_the_calls(
    scheduler: Scheduler, timeout_s: float, remaining_s: float | None, limits: list[float]
) -> None:
    scheduler.add_core()
    stream = aiter(scheduler.servicer.Generate(submit("a", timeout_s=timeout_s), Context(remaining_s)))
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert [entry[3] for entry in scheduler.engine._open._deadlines._heap] == limits
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_stream_without_an_id_gets_one(scheduler: Scheduler) -> None:
    scheduler.add_core()
    streams = [aiter(scheduler.servicer.Generate(submit(""), Context())) for _ in range(2)]
    waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    assert len(scheduler.engine.requests) == 2
    assert all(name.startswith("generate-") and len(name) == 25 for name in scheduler.engine.requests)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


@pytest.mark.parametrize(("has_model", "is_refused"), [(False, True), (True, False)])
async def test_a_stream_is_refused_until_a_model_is_known(
    scheduler: Scheduler, has_model: bool, is_refused: bool
) -> None:
    if has_model:
        scheduler.groups.model_info = types_pb2.ModelInfo(max_model_len=64, vocab_size=100)
    waiting = asyncio.ensure_future(anext(aiter(scheduler.servicer.Generate(submit("a"), Context()))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waiting.done() is is_refused
    if is_refused:
        error = waiting.exception()
        assert isinstance(error, NotReady)
        assert (error.message, error.retry_after_s) == ("not ready: no worker has registered yet", 1)
        with pytest.raises(NotReady, match="not ready: no worker has registered yet"):
            await scheduler.servicer.GetModelInfo(scheduler_pb2.GetSchedulerModelInfoRequest(), CALL)
    else:
        waiting.cancel()
        await asyncio.wait([waiting])
        info = await scheduler.servicer.GetModelInfo(scheduler_pb2.GetSchedulerModelInfoRequest(), CALL)
        assert info.vocab_size == 100


class Traces:
    """Notes what is followed."""

    def __init__(self) -> None:
        self.begun: list[tuple[list[Request], str]] = []
        self.forgotten: list[list[Request]] = []

    def begin(self, sequences: list[Request], traceparent: str) -> None:
        self.begun.append((sequences, traceparent))

    def forget(self, sequences: list[Request]) -> None:
        self.forgotten.append(sequences)

    def end(self, sequences: list[Request]) -> None:
        pass


async def test_a_sampled_request_is_followed_and_one_that_is_refused_no_more(scheduler: Scheduler) -> None:
    traces = Traces()
    scheduler.engine.traces = cast("Any", traces)
    scheduler.add_core()
    sink = scheduler.session()
    for name, traceparent in (("a", "00-1-2-01"), ("b", "")):
        scheduler.servicer._take(scheduler_pb2.FrontendMessage(submit=submit(name, traceparent=traceparent)), sink)
    long = submit("long", traceparent="00-3-4-01", prompt_token_ids=token_ids_to_bytes([1] * 64))
    scheduler.servicer._take(scheduler_pb2.FrontendMessage(submit=long), sink)
    sequences = scheduler.engine.requests["a"].sequences
    assert [traceparent for _, traceparent in traces.begun] == ["00-1-2-01", "00-3-4-01"]
    assert traces.begun[0][0] == sequences
    assert traces.forgotten == [traces.begun[1][0]]


# Adapters.


@pytest.fixture
async def adapting() -> Scheduler:
    return Scheduler(lora=LoraConfig(enable_lora=True, max_loras=2, max_cpu_loras=2))


def lora(name: str, path: str = "") -> types_pb2.LoraAdapter:
    return types_pb2.LoraAdapter(name=name, path=path)


async def test_an_adapter_that_is_named_alone_is_looked_up(adapting: Scheduler, scheduler: Scheduler) -> None:
    adapting.state.adapters.put(LoraAdapter(name="sql", path="/sql", version=5))
    named, whole, none = submit("a", lora=lora("sql")), submit("b", lora=lora("own", "/own")), submit("c")
    for message in (named, whole, none):
        adapting.servicer._settle_adapter(message)
    assert (named.lora.path, named.lora.version, whole.lora.path) == ("/sql", 5, "/own")
    assert not none.HasField("lora")
    with pytest.raises(NotFound, match="the adapter 'other' does not exist"):
        adapting.servicer._settle_adapter(submit("d", lora=lora("other")))
    with pytest.raises(InvalidRequest, match="lora is 'sql', adapters need --enable-lora") as caught:
        scheduler.servicer._settle_adapter(submit("e", lora=lora("sql", "/sql")))
    assert caught.value.field == "lora"
    scheduler.servicer._settle_adapter(submit("f"))


async def add(scheduler: Scheduler, name: str, path: str, *, load_inplace: bool = False) -> types_pb2.LoraAdapter:
    request = scheduler_pb2.AddLoraRequest(adapter=lora(name, path), load_inplace=load_inplace)
    return (await scheduler.servicer.AddLora(request, CALL)).adapter


async def test_an_adapter_is_listed_when_every_group_has_read_it(adapting: Scheduler) -> None:
    groups = [Group(), Group()]
    cores = [adapting.add_core(group=group, can_adapt=True) for group in groups]
    added = await add(adapting, "sql", "/sql")
    assert (added.name, added.path, added.version > 0) == ("sql", "/sql", True)
    assert [group.read for group in groups] == [[(1, "sql")], [(1, "sql")]]
    listed = await adapting.servicer.ListLoras(scheduler_pb2.ListLorasRequest(), CALL)
    assert [each.name for each in listed.adapters] == ["sql"]
    again = await add(adapting, "sql", "/newer", load_inplace=True)
    assert again.version > added.version
    for core in cores:
        assert core.adapters is not None
        assert [entry.adapter.path for entry in core.adapters._entries.values()] == ["/sql", "/newer"]
    await add(adapting, "chat", "/chat")
    for core in cores:
        assert core.adapters is not None
        paths = [entry.adapter.path for entry in core.adapters._entries.values()]
        assert paths == ["/newer", "/chat"], "the older weights went first"


async def test_an_adapter_that_a_group_cannot_read_is_not_listed(adapting: Scheduler) -> None:
    first, second = Group(), Group()
    second.errors.append(ModelLoadError("no such file"))
    for group in (first, second):
        adapting.add_core(group=group, can_adapt=True)
    with pytest.raises(ModelLoadError, match="no such file"):
        await add(adapting, "sql", "/sql")
    assert adapting.state.adapters.listed() == []


async def test_a_group_that_is_lost_meanwhile_reads_an_adapter_later(
    adapting: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_scheduler.engine.engine_core.LOAD_RETRY_S", 0.0)
    first, second = Group(), Group()
    second.errors.append(PagodaError("gone", code=Code.UNAVAILABLE))
    for group in (first, second):
        adapting.add_core(group=group, can_adapt=True)
    await add(adapting, "sql", "/sql")
    assert [adapter.name for adapter in adapting.state.adapters.listed()] == ["sql"]


async def test_a_pinned_adapter_is_read_at_once_and_one_that_is_let_go_may_leave(adapting: Scheduler) -> None:
    group = Group()
    core = adapting.add_core(group=group, can_adapt=True)
    adapting.add_core()  # a group that takes no adapters
    assert core.adapters is not None
    adapting.engine.cores.pop()
    adapting.state.adapters.put(LoraAdapter(name="sql", path="/sql"))
    key = LoraAdapter(name="sql", path="/sql").key
    await adapting.servicer.PinLora(scheduler_pb2.PinLoraRequest(name="sql", is_pinned=True), CALL)
    assert (group.read, core.adapters._pinned) == ([(1, "sql")], {key})
    assert adapting.state.adapters.find("sql").is_pinned
    await adapting.servicer.PinLora(scheduler_pb2.PinLoraRequest(name="sql", is_pinned=False), CALL)
    assert (core.adapters._pinned, adapting.state.adapters.find("sql").is_pinned) == (set(), False)
    await adapting.servicer.PinLora(scheduler_pb2.PinLoraRequest(name="sql", is_pinned=True), CALL)
    await adapting.servicer.RemoveLora(scheduler_pb2.RemoveLoraRequest(name="sql"), CALL)
    assert (core.adapters._pinned, adapting.state.adapters.listed()) == (set(), [])
    with pytest.raises(NotFound):
        await adapting.servicer.RemoveLora(scheduler_pb2.RemoveLoraRequest(name="sql"), CALL)


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
