"""WorkerServicer over a worker that records its calls: who may call, calls of the core, and answers."""

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagoda.v1 import scheduler_pb2, types_pb2, worker_pb2
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.engine.convert import structured_outputs_to_proto
from pagoda_common.errors import Code, InvalidRequest, ModelLoadError, PagodaError, StaleEpoch, Superseded
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_worker.models.cache_groups import CacheGroup, make_layout
from pagoda_worker.rpc import servicer as module
from tests.unit.worker.rpc.served_worker import CALL, FACTS, OTHER, Served, init_request


def source_to_proto(source: WeightsSource) -> types_pb2.WeightsSource:
    return types_pb2.WeightsSource(
        model=source.model,
        revision=source.revision or "",
        version=source.version,
        is_for_one_group=source.is_for_one_group,
    )


async def test_a_newer_scheduler_takes_over_and_the_same_one_may_ask_again(served: Served) -> None:
    stream = module.ExecuteStream()
    served.servicer._replace_stream(stream, "")
    device = await served.servicer.InitDevice(
        init_request(6, weights=source_to_proto(OTHER), rendezvous_address="host:2"), CALL
    )
    assert device.worker_incarnation == served.servicer.fence.incarnation
    assert (device.device, device.total_memory_bytes, device.rendezvous_address) == ("a device", 123, "meet:1")
    given = {"rendezvous": "host:2", "takes_cache_groups": True}
    assert served.core.asked == [("abandon",), ("init_device", "m", OTHER, given)]
    assert (served.serving, served.servicer.fence.session_epoch) == ([False], 6)
    with pytest.raises(Superseded, match="a newer scheduler took over"):
        await asyncio.wait_for(stream.next(), 60)
    await served.servicer.InitDevice(init_request(6), CALL)
    assert served.core.asked[-1] == ("init_device", "m", None, {"rendezvous": "", "takes_cache_groups": True})
    assert served.serving == [False], "it serves on"
    with pytest.raises(StaleEpoch):
        await served.servicer.InitDevice(init_request(5), CALL)


async def test_a_load_is_followed_by_who_asks_meanwhile(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.PROGRESS_PERIOD_S == 0.2
    monkeypatch.setattr(module, "PROGRESS_PERIOD_S", 0.005)
    served.core.gate.clear()
    request = worker_pb2.LoadModelRequest(session_epoch=5)
    first, second = (aiter(served.servicer.LoadModel(request, CALL)) for _ in range(2))
    progress = await anext(first)
    while not progress.loaded_bytes:
        progress = await anext(first)
    assert (progress.loaded_bytes, progress.total_bytes, progress.HasField("model_info")) == (5, 50, False)
    other = await anext(second)
    assert other.total_bytes == 50
    served.core.gate.set()
    for stream in (first, second):
        last = [message async for message in stream][-1]
        assert (last.loaded_bytes, last.total_bytes, last.model_info.model) == (50, 50, "m")
    assert served.core.asked == [("load_model",)]
    _ = [message async for message in served.servicer.LoadModel(request, CALL)]
    assert served.core.asked == [("load_model",)] * 2


async def test_a_load_that_fails_says_so_and_may_be_tried_again(served: Served) -> None:
    served.core.failure = ModelLoadError("no such file")
    request = worker_pb2.LoadModelRequest(session_epoch=5)
    with pytest.raises(ModelLoadError, match="no such file"):
        _ = [message async for message in served.servicer.LoadModel(request, CALL)]
    served.core.failure = None
    assert [message async for message in served.servicer.LoadModel(request, CALL)][-1].model_info.model == "m"


async def test_sizes_of_the_cache_are_told_and_taken(served: Served) -> None:
    blocks = await served.servicer.DetermineNumAvailableBlocks(
        worker_pb2.DetermineNumAvailableBlocksRequest(session_epoch=5), CALL
    )
    assert (blocks.num_blocks, blocks.num_cpu_blocks, blocks.block_bytes) == (1, 2, 3)
    assert (blocks.num_state_snapshots, blocks.num_cpu_state_snapshots, blocks.state_bytes) == (4, 5, 6)
    assert served.serving == [False]
    request = worker_pb2.InitializeCacheRequest(
        session_epoch=5, num_blocks=11, num_cpu_blocks=12, num_state_snapshots=13, num_cpu_state_snapshots=14
    )
    assert (await served.servicer.InitializeCache(request, CALL)).swap_block_ns == 77
    sizes = {"num_blocks": 11, "num_cpu_blocks": 12, "num_state_snapshots": 13, "num_cpu_state_snapshots": 14}
    assert served.core.asked == [("initialize_cache", sizes)]
    assert served.serving == [False, True]


async def test_a_new_cache_ends_the_stream_and_begins_with_step_1(served: Served) -> None:
    await served.servicer.ExecuteModel(served.step(1), CALL)
    assert served.servicer.last_step == 1
    stream = module.ExecuteStream()
    served.servicer._replace_stream(stream, "")
    await served.servicer.InitializeCache(worker_pb2.InitializeCacheRequest(session_epoch=5, num_blocks=1), CALL)
    assert served.servicer.last_step == 0
    with pytest.raises(Superseded, match="the cache was initialized again"):
        await stream.next()
    await served.servicer.ExecuteModel(served.step(1), CALL)


async def test_a_step_is_answered_and_a_repeated_one_is_not_computed_again(served: Served) -> None:
    answer = await served.servicer.ExecuteModel(served.step(1, 3), CALL)
    assert (answer.step, np.frombuffer(answer.token_ids, "<u4").tolist()) == (1, [3])
    assert (answer.timings.queue_ns, answer.timings.sample_ns) == (1, 4)
    assert await served.servicer.ExecuteModel(served.step(1, 3), CALL) == answer
    assert served.core.asked == [("expect", 3)]
    assert [(step.num_seqs, output.token_ids.tolist()) for step, output in served.observed] == [(3, [3])]
    with pytest.raises(StaleEpoch, match="step is 3, must be 2"):
        await served.servicer.ExecuteModel(served.step(3), CALL)
    assert served.servicer.last_step == 1


async def test_a_step_that_fails_or_cannot_be_read_says_so(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="slots has 3 bytes"):
        await served.servicer.ExecuteModel(served.step(1, slots=b"123"), CALL)
    assert served.servicer.last_step == 0, "it was not taken on"
    served.core.failure = PagodaError("no memory")
    with pytest.raises(PagodaError, match="no memory"):
        await served.servicer.ExecuteModel(served.step(1), CALL)
    assert (served.servicer.last_step, served.observed) == (1, [])


@pytest.mark.parametrize("wrong", [{"session_epoch": 4}, {"session_epoch": 6}, {"worker_incarnation": 2}])
async def test_calls_of_others_are_refused(served: Served, wrong: dict[str, int]) -> None:
    ids = {**served.ids, **wrong}
    servicer = served.servicer
    number = {"number": 1}
    calls: list[Any] = [
        servicer.ExecuteModel(served.step(1, **wrong), CALL),
        servicer.Sleep(worker_pb2.WorkerSleepRequest(**ids, level=1), CALL),
        servicer.WakeUp(worker_pb2.WorkerWakeUpRequest(**ids), CALL),
        anext(aiter(servicer.PrepareWeights(worker_pb2.PrepareWeightsRequest(**ids), CALL))),
        anext(aiter(servicer.ReloadWeights(worker_pb2.WorkerReloadWeightsRequest(**ids), CALL))),
        anext(aiter(servicer.HoldConstraint(worker_pb2.HoldConstraintRequest(**ids), CALL))),
        servicer.AddLora(worker_pb2.WorkerAddLoraRequest(**ids, **number), CALL),
        servicer.RemoveLora(worker_pb2.WorkerRemoveLoraRequest(**ids, **number), CALL),
        servicer.PinLora(worker_pb2.WorkerPinLoraRequest(**ids, **number), CALL),
    ]
    if "session_epoch" in wrong:
        epoch = wrong["session_epoch"]
        calls += [
            anext(aiter(servicer.LoadModel(worker_pb2.LoadModelRequest(session_epoch=epoch), CALL))),
            servicer.DetermineNumAvailableBlocks(
                worker_pb2.DetermineNumAvailableBlocksRequest(session_epoch=epoch), CALL
            ),
            servicer.InitializeCache(worker_pb2.InitializeCacheRequest(session_epoch=epoch), CALL),
        ]
    for call in calls:
        with pytest.raises(StaleEpoch):
            await call
    assert (served.core.asked, served.serving) == ([], [])


async def test_sleep_ends_the_stream_and_waking_says_what_comes_back(served: Served) -> None:
    stream = module.ExecuteStream()
    served.servicer._replace_stream(stream, "")
    for level in (0, 3):
        with pytest.raises(InvalidRequest, match=f"level is {level}, must be 1 or 2") as caught:
            await served.servicer.Sleep(worker_pb2.WorkerSleepRequest(**served.ids, level=level), CALL)
        assert caught.value.field == "level"
    assert served.serving == []
    for level in (1, 2):
        slept = await served.servicer.Sleep(worker_pb2.WorkerSleepRequest(**served.ids, level=level), CALL)
        assert slept.freed_bytes == 99
    with pytest.raises(Superseded, match="the worker was put to sleep"):
        await stream.next()
    for weights_only in (True, False):
        await served.servicer.WakeUp(worker_pb2.WorkerWakeUpRequest(**served.ids, weights_only=weights_only), CALL)
    assert served.core.asked == [("sleep", 1), ("sleep", 2), ("wake_up", True), ("wake_up", False)]
    assert served.serving == [False, False]


async def test_weights_are_prepared_and_changed_over_to(served: Served) -> None:
    served.core.facts = FACTS
    prepare = worker_pb2.PrepareWeightsRequest(**served.ids, weights=source_to_proto(OTHER))
    last = [message async for message in served.servicer.PrepareWeights(prepare, CALL)][-1]
    assert (last.loaded_bytes, last.total_bytes, last.model_info.HasField("weights")) == (70, 70, False)
    assert served.serving == []
    stream = module.ExecuteStream()
    served.servicer._replace_stream(stream, "")
    reload = worker_pb2.WorkerReloadWeightsRequest(**served.ids, weights=source_to_proto(OTHER))
    last = [message async for message in served.servicer.ReloadWeights(reload, CALL)][-1]
    assert last.model_info.weights == source_to_proto(OTHER)
    assert served.core.asked == [("prepare", OTHER), ("reload", OTHER)]
    with pytest.raises(Superseded, match="other weights take the place of those in use"):
        await stream.next()
    assert served.serving == [False]
    forget = worker_pb2.PrepareWeightsRequest(**served.ids)
    _ = [message async for message in served.servicer.PrepareWeights(forget, CALL)]
    assert served.core.asked[-1] == ("prepare", None)
    _ = [message async for message in served.servicer.ReloadWeights(reload, CALL)]
    assert served.core.asked[-2:] == [("prepare", OTHER), ("reload", OTHER)], "they are read first"
    served.core.prepared, served.core.failure = [], ModelLoadError("they do not fit")
    with pytest.raises(ModelLoadError, match="they do not fit"):
        _ = [message async for message in served.servicer.ReloadWeights(reload, CALL)]
    assert served.core.asked[-1] == ("prepare", OTHER)


async def test_the_status_and_the_identity_say_what_was_asked_for(served: Served) -> None:
    status = await served.servicer.GetStatus(worker_pb2.GetStatusRequest(), CALL)
    assert (status.worker_incarnation, status.session_epoch) == (served.servicer.fence.incarnation, 5)
    assert (status.state, status.last_step, status.num_blocks, status.sleep_level) == ("device", 0, 17, 0)
    assert not status.HasField("model_info")
    identity = scheduler_pb2.WorkerIdentity(address="a")
    served.servicer.describe_weights(identity)
    assert (identity.sleep_level, identity.HasField("weights")) == (0, False)
    served.core.facts, served.core.weights, served.core.sleep_level = FACTS, OTHER, 2
    await served.servicer.ExecuteModel(served.step(1), CALL)
    status = await served.servicer.GetStatus(worker_pb2.GetStatusRequest(), CALL)
    assert (status.last_step, status.sleep_level, status.model_info.weights) == (1, 2, source_to_proto(OTHER))
    assert len(status.model_info.cache_groups) == 0
    served.servicer.describe_weights(identity)
    assert (identity.sleep_level, identity.weights) == (2, source_to_proto(OTHER))
    served.core.weights = None
    served.servicer.describe_weights(identity)
    assert not identity.HasField("weights")
    groups = (CacheGroup("full", (0,)), CacheGroup("window", (1,), 8))
    served.core.cache_layout = make_layout(groups, max_model_len=20, knows_groups=True)
    status = await served.servicer.GetStatus(worker_pb2.GetStatusRequest(), CALL)
    kinds = [(group.kind, group.num_layers, group.window) for group in status.model_info.cache_groups]
    assert kinds == [(types_pb2.CACHE_KIND_FULL, 1, 0), (types_pb2.CACHE_KIND_WINDOW, 1, 8)]


class Adapters:
    """Records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def load(self, number: int, name: LoraAdapter) -> Any:
        self.asked.append(("load", number, name))
        return SimpleNamespace(name=name, num_bytes=33, rank=4)

    def remove(self, number: int) -> None:
        self.asked.append(("remove", number))

    def pin(self, number: int, *, is_pinned: bool) -> None:
        self.asked.append(("pin", number, is_pinned))

    def listed(self) -> list[Any]:
        name = LoraAdapter(name="a", path="/a", version=3)
        return [
            (2, SimpleNamespace(name=name, num_bytes=33), True),
            (5, SimpleNamespace(name=name, num_bytes=34), False),
        ]


async def test_adapters_are_the_store_s(served: Served) -> None:
    adapter = types_pb2.LoraAdapter(name="a", path="/a", version=3)
    request = worker_pb2.WorkerAddLoraRequest(**served.ids, number=1, adapter=adapter)
    with pytest.raises(PagodaError, match="the model is not loaded, or without adapters") as caught:
        await served.servicer.AddLora(request, CALL)
    assert caught.value.code is Code.FAILED_PRECONDITION
    listed = await served.servicer.ListLoras(worker_pb2.WorkerListLorasRequest(), CALL)
    assert len(listed.loras) == 0
    served.core.adapters = store = Adapters()
    added = await served.servicer.AddLora(request, CALL)
    assert (added.num_bytes, added.rank) == (33, 4)
    with pytest.raises(InvalidRequest, match="number is 0, must be at least 1"):
        await served.servicer.AddLora(worker_pb2.WorkerAddLoraRequest(**served.ids, adapter=adapter), CALL)
    for is_pinned in (True, False):
        pin = worker_pb2.WorkerPinLoraRequest(**served.ids, number=2, is_pinned=is_pinned)
        await served.servicer.PinLora(pin, CALL)
    await served.servicer.RemoveLora(worker_pb2.WorkerRemoveLoraRequest(**served.ids, number=3), CALL)
    name = LoraAdapter(name="a", path="/a", version=3)
    assert store.asked == [("load", 1, name), ("pin", 2, True), ("pin", 2, False), ("remove", 3)]
    listed = await served.servicer.ListLoras(worker_pb2.WorkerListLorasRequest(), CALL)
    found = [(each.number, each.adapter, each.num_bytes, each.is_on_device) for each in listed.loras]
    assert found == [(2, adapter, 33, True), (5, adapter, 34, False)]


async def test_a_constraint_is_held_for_as_long_as_the_caller_listens(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Kept:
        @contextmanager
        def held(self, params: Any) -> Any:
            told.append(f"hold {params.regex}")
            try:
                yield
            finally:
                told.append("let go")

    async def compiled(kept: Any, params: Any) -> None:
        told.append("compiled")

    monkeypatch.setattr(module, "compiled", compiled)
    monkeypatch.setattr(served.core, "grammars", Kept(), raising=False)
    request = worker_pb2.HoldConstraintRequest(
        **served.ids, structured_output=structured_outputs_to_proto(StructuredOutputsParams(regex="a+"))
    )
    stream = aiter(served.servicer.HoldConstraint(request, CALL))
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert told == ["hold a+", "compiled"]
    waiting.cancel()
    await asyncio.wait([waiting])
    assert told[2:] == ["let go"]


async def test_a_load_is_given_up_when_the_worker_shuts_down() -> None:
    served = Served()
    await served.servicer.close()
    assert served.core.asked == [("abandon",)]
    with pytest.raises(PagodaError, match="the worker is shutting down"):
        served.servicer._on_progress(1, 2)


async def test_a_scheduler_with_a_wrong_config_takes_nothing_over(served: Served) -> None:
    request = init_request(9)
    request.config.block_size = 0
    with pytest.raises(PagodaError, match="block_size is 0"):
        await served.servicer.InitDevice(request, CALL)
    assert (served.servicer.fence.session_epoch, served.serving, served.core.asked) == (5, [], [])


async def test_weights_that_were_read_for_a_scheduler_that_is_gone_are_not_changed_to(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(source: WeightsSource | None, progress: Any) -> None:
        served.servicer.fence.claim(6)

    served.core.facts = FACTS
    monkeypatch.setattr(served.core, "prepare_weights", prepare)
    request = worker_pb2.WorkerReloadWeightsRequest(**served.ids, weights=source_to_proto(OTHER))
    with pytest.raises(StaleEpoch, match="session_epoch is 5, must be 6"):
        _ = [message async for message in served.servicer.ReloadWeights(request, CALL)]
    assert (served.core.asked, served.serving) == ([], [])


async def test_a_worker_that_ends_finishes_its_step_and_takes_no_more(served: Served) -> None:
    step = asyncio.ensure_future(served.servicer.ExecuteModel(served.step(1), CALL))
    await asyncio.sleep(0)
    await served.servicer.close()
    assert (await step).step == 1
    for thread in (served.servicer._thread, served.servicer._reader, served.servicer._lora_reader):
        with pytest.raises(RuntimeError, match="shutdown"):
            thread.submit(print)
