"""SchedulerServicer without a server: what each call hands to the engine, and every field of what it answers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.errors import Code, InvalidRequest, ModelLoadError, NotFound, NotReady, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.core.request import Request
from tests.unit.scheduler.engine.test_engine_core import Group
from tests.unit.scheduler.rpc.served_engine import Scheduler, sent, submit

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


@pytest.fixture
async def scheduler() -> Scheduler:
    return Scheduler()


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
