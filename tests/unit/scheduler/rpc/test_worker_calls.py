"""What a worker is asked in each call beside its steps, field by field, and what is made of its answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pagoda.v1 import types_pb2, worker_pb2
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.engine.convert import structured_outputs_to_proto, weights_source_to_proto
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.kv.cache_group import CacheSizes
from pagoda_scheduler.rpc.convert import worker_config_to_proto
from pagoda_scheduler.rpc.worker_client import WorkerClient
from pagoda_scheduler.rpc.worker_control import GroupControl, WorkerControl

OURS = {"session_epoch": 7, "worker_incarnation": 5}
CONFIG = EngineConfig()
HELD = WeightsSource(model="/models/held", revision="r1", version=3, is_for_one_group=True)
SOURCE = WeightsSource(model="/models/new", revision="r2", version=4)
INFO = types_pb2.ModelInfo(model="m", vocab_size=9)


class Stream:
    """Answers of a call that has several; waits for more when `is_open`."""

    def __init__(self, messages: list[Any], *, error: Exception | None = None) -> None:
        self._messages = messages
        self._error = error
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for message in self._messages:
            yield message
        if self._error is not None:
            raise self._error

    async def read(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._messages.pop(0) if self._messages else grpc.aio.EOF

    def cancel(self) -> None:
        self.is_cancelled = True


class Stub:
    """Records each call, and gives the answers that the test has set."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[str, Any, dict[str, Any]]] = []
        self._answers: dict[str, Any] = {
            "InitDevice": worker_pb2.InitDeviceResponse(worker_incarnation=5, rendezvous_address="r:1")
        } | answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(request: Any, **options: Any) -> Any:
            self.asked.append((name, request, options))
            answer = self._answers.get(name)
            return answer if isinstance(answer, Stream) else self._answer(answer)

        return call

    async def _answer(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


def failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="the reason")


def client(**answers: Any) -> tuple[WorkerClient, Stub]:
    made = WorkerClient(address="127.0.0.1:1", incarnation=5, session_epoch=7)
    made._stub = stub = Stub(**answers)
    return made, stub


def control(**answers: Any) -> tuple[WorkerControl, Stub]:
    made = WorkerControl(config=CONFIG, weights=HELD, address="127.0.0.1:1", incarnation=5, session_epoch=7)
    made._stub = stub = Stub(**answers)
    return made, stub


def init(weights: WeightsSource | None, rendezvous: str = "") -> worker_pb2.InitDeviceRequest:
    message = worker_pb2.InitDeviceRequest(
        session_epoch=7, config=worker_config_to_proto(CONFIG), rendezvous_address=rendezvous
    )
    if weights is not None:
        message.weights.CopyFrom(weights_source_to_proto(weights))
    return message


CLAIM = ("InitDevice", init(HELD), {"timeout": 60.0})


async def test_a_device_is_claimed() -> None:
    made, stub = client()
    assert await made.init_device(CONFIG, HELD, rendezvous="r:2") == "r:1"
    assert await made.init_device(CONFIG) == "r:1"
    options = {"timeout": 60.0, "wait_for_ready": True}
    assert stub.asked == [("InitDevice", init(HELD, "r:2"), options), ("InitDevice", init(None), options)]


async def test_a_worker_that_was_restarted_is_another_one() -> None:
    other = worker_pb2.InitDeviceResponse(worker_incarnation=6)
    for call in (
        client(InitDevice=other)[0].init_device(CONFIG),
        control(InitDevice=other)[0].sleep(1),
        control(InitDevice=other)[0].wake_up(weights_only=True),
    ):
        with pytest.raises(NotReady, match=r"worker at 127\.0\.0\.1:1 was restarted; waiting for its registration"):
            await call


async def test_the_model_is_loaded() -> None:
    progress = [worker_pb2.LoadModelProgress(), worker_pb2.LoadModelProgress(model_info=INFO)]
    made, stub = client(LoadModel=Stream(progress))
    assert await made.load_model() == INFO
    assert stub.asked == [("LoadModel", worker_pb2.LoadModelRequest(session_epoch=7), {})]
    made, _ = client(LoadModel=Stream([worker_pb2.LoadModelProgress()]))
    with pytest.raises(NotReady, match=r"ended LoadModel without model_info"):
        await made.load_model()


async def test_sizes_of_the_cache_are_asked_for_and_told() -> None:
    available = worker_pb2.DetermineNumAvailableBlocksResponse(
        num_blocks=1, num_cpu_blocks=2, num_state_snapshots=3, num_cpu_state_snapshots=4
    )
    made, stub = client(
        DetermineNumAvailableBlocks=available, InitializeCache=worker_pb2.InitializeCacheResponse(swap_block_ns=55)
    )
    sizes = await made.determine_num_available_blocks()
    assert sizes == CacheSizes(num_blocks=1, num_host_blocks=2, num_state_snapshots=3, num_host_state_snapshots=4)
    assert await made.initialize_cache(sizes) == 55
    told = worker_pb2.InitializeCacheRequest(
        session_epoch=7, num_blocks=1, num_cpu_blocks=2, num_state_snapshots=3, num_cpu_state_snapshots=4
    )
    asked = worker_pb2.DetermineNumAvailableBlocksRequest(session_epoch=7)
    assert stub.asked == [
        ("DetermineNumAvailableBlocks", asked, {"timeout": 300.0}),
        ("InitializeCache", told, {"timeout": 300.0}),
    ]


CONSTRAINT = StructuredOutputsParams(regex="a+")


async def test_a_constraint_is_held_until_it_is_released() -> None:
    stream = Stream([worker_pb2.HoldConstraintResponse()])
    made, stub = client(HoldConstraint=stream)
    await made.hold_constraint(CONSTRAINT)
    asked = worker_pb2.HoldConstraintRequest(**OURS, structured_output=structured_outputs_to_proto(CONSTRAINT))
    assert stub.asked == [("HoldConstraint", asked, {})]
    made.release_constraint(StructuredOutputsParams(regex="b"))
    assert not stream.is_cancelled
    made.release_constraint(CONSTRAINT)
    assert stream.is_cancelled
    made.release_constraint(CONSTRAINT)


@pytest.mark.parametrize(
    ("stream", "kind", "code"),
    [
        (Stream([], error=failure(grpc.StatusCode.INVALID_ARGUMENT)), InvalidRequest, Code.INVALID_ARGUMENT),
        (Stream([], error=failure(grpc.StatusCode.UNAVAILABLE)), PagodaError, Code.UNAVAILABLE),
        (Stream([]), NotReady, Code.UNAVAILABLE),
    ],
)
async def test_a_constraint_that_is_not_held(stream: Stream, kind: type[PagodaError], code: Code) -> None:
    made, _ = client(HoldConstraint=stream)
    with pytest.raises(kind) as caught:
        await made.hold_constraint(CONSTRAINT)
    assert caught.value.code is code
    assert caught.value.field == ("structured_outputs" if kind is InvalidRequest else None)
    assert stream.is_cancelled
    assert not made._holds


async def test_a_constraint_that_no_one_waits_for_any_more_is_not_compiled_on() -> None:
    stream, is_asked = Stream([]), asyncio.Event()

    async def read() -> Any:
        is_asked.set()
        await asyncio.Event().wait()

    stream.read = read  # type: ignore[method-assign]  # the worker still compiles
    made, _ = client(HoldConstraint=stream)
    holding = asyncio.create_task(made.hold_constraint(CONSTRAINT))
    await is_asked.wait()
    holding.cancel()
    await asyncio.wait([holding])
    assert (holding.cancelled(), stream.is_cancelled, made._holds) == (True, True, {})


async def test_what_is_held_ends_with_the_client() -> None:
    stream = Stream([worker_pb2.HoldConstraintResponse()])
    made, _ = client(HoldConstraint=stream)
    await made.hold_constraint(CONSTRAINT)
    await made.close()
    assert stream.is_cancelled


async def test_an_adapter_is_added() -> None:
    made, stub = client()
    await made.add_lora(3, LoraAdapter(name="a", path="/p", version=2))
    adapter = types_pb2.LoraAdapter(name="a", path="/p", version=2)
    request = worker_pb2.WorkerAddLoraRequest(**OURS, number=3, adapter=adapter)
    assert stub.asked == [("AddLora", request, {"timeout": 600.0})]


async def test_bytes_are_counted_over_all_steps() -> None:
    made, _ = client()
    request = worker_pb2.ExecuteModelRequest(session_epoch=7)
    answer = worker_pb2.SamplerOutput(step=300)
    for count in range(1, 4):
        data = made._to_bytes(request)
        assert worker_pb2.ExecuteModelRequest.FromString(data) == request
        assert made._from_bytes(answer.SerializeToString()) == answer
        assert made.num_bytes_sent == count * request.ByteSize()
        assert made.num_bytes_received == count * answer.ByteSize()
    assert request.ByteSize() != answer.ByteSize()


async def test_sleep_and_waking() -> None:
    made, stub = control(Sleep=worker_pb2.WorkerSleepResponse(freed_bytes=99))
    assert await made.sleep(2) == 99
    await made.wake_up(weights_only=True)
    assert stub.asked == [
        CLAIM,
        ("Sleep", worker_pb2.WorkerSleepRequest(**OURS, level=2), {"timeout": 600.0}),
        CLAIM,
        ("WakeUp", worker_pb2.WorkerWakeUpRequest(**OURS, weights_only=True), {"timeout": 600.0}),
    ]


async def test_other_weights() -> None:
    progress = [worker_pb2.LoadModelProgress(loaded_bytes=1, total_bytes=2)]
    made, stub = control(ReloadWeights=Stream(progress))
    await made.reload(SOURCE)
    request = worker_pb2.WorkerReloadWeightsRequest(**OURS, weights=weights_source_to_proto(SOURCE))
    assert stub.asked == [("ReloadWeights", request, {})]


@pytest.mark.parametrize(
    ("status", "is_asked"),
    [
        ({"session_epoch": 7, "model_info": INFO}, True),
        ({"session_epoch": 6, "model_info": INFO}, False),
        ({"session_epoch": 7}, False),
    ],
)
async def test_weights_are_prepared_where_there_is_a_model_of_ours(status: dict[str, Any], is_asked: bool) -> None:
    for source in (SOURCE, None):
        made, stub = control(GetStatus=worker_pb2.GetStatusResponse(**status), PrepareWeights=Stream([]))
        assert await made.prepare(source) is is_asked
        request = worker_pb2.PrepareWeightsRequest(**OURS)
        if source is not None:
            request.weights.CopyFrom(weights_source_to_proto(source))
        asked = [("GetStatus", worker_pb2.GetStatusRequest(), {"timeout": 60.0})]
        assert stub.asked == asked + ([("PrepareWeights", request, {})] if is_asked else [])


async def test_a_worker_s_reason_is_the_error() -> None:
    away = failure(grpc.StatusCode.UNAVAILABLE)
    status = worker_pb2.GetStatusResponse(session_epoch=7, model_info=INFO)
    for call in (
        client(InitDevice=away)[0].init_device(CONFIG),
        client(LoadModel=Stream([], error=away))[0].load_model(),
        client(DetermineNumAvailableBlocks=away)[0].determine_num_available_blocks(),
        client(InitializeCache=away)[0].initialize_cache(CacheSizes(num_blocks=1)),
        client(AddLora=away)[0].add_lora(1, LoraAdapter(name="a", path="/p")),
        control(Sleep=away)[0].sleep(1),
        control(WakeUp=away)[0].wake_up(weights_only=False),
        control(ReloadWeights=Stream([], error=away))[0].reload(SOURCE),
        control(GetStatus=away)[0].prepare(SOURCE),
        control(GetStatus=status, PrepareWeights=Stream([], error=away))[0].prepare(SOURCE),
    ):
        with pytest.raises(PagodaError, match="the reason") as caught:
            await call
        assert caught.value.code is Code.UNAVAILABLE


async def test_a_group_asks_every_rank_whatever_the_others_say() -> None:
    away = failure(grpc.StatusCode.UNAVAILABLE)
    good, bad, last = (
        control(Sleep=answer, ReloadWeights=Stream([], error=error))
        for answer, error in (
            (worker_pb2.WorkerSleepResponse(freed_bytes=5), None),
            (away, away),
            (worker_pb2.WorkerSleepResponse(freed_bytes=6), None),
        )
    )
    assert await GroupControl([good[0], last[0]]).sleep(1) == 11
    group = GroupControl([rank for rank, _ in (good, bad, last)])
    for call in (group.sleep(1), group.reload(SOURCE)):
        with pytest.raises(PagodaError, match="the reason"):
            await call
    assert [name for name, _, _ in last[1].asked][-1] == "ReloadWeights"


async def test_a_group_has_prepared_when_all_ranks_have() -> None:
    ready = worker_pb2.GetStatusResponse(session_epoch=7, model_info=INFO)
    for statuses, is_prepared in (
        ((ready, ready), True),
        ((ready, worker_pb2.GetStatusResponse(session_epoch=7)), False),
    ):
        ranks = [control(GetStatus=status, PrepareWeights=Stream([]))[0] for status in statuses]
        assert await GroupControl(ranks).prepare(SOURCE) is is_prepared
