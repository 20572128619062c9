"""From InitDevice to Execute, again and again: what a scheduler may repeat, and who may call."""

import asyncio
import json
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.v1 import worker_pb2
from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.process.children import free_port
from pagoda_common.rpc.service import LIVENESS
from pagoda_worker.parallel import tensor_parallel
from pagoda_worker.steps.pending_step import PendingStep
from pagoda_worker.steps.step import StepInput
from tests.service.worker.conftest import SERVICE, Caller, Served, new_request, tokens_of, until, worker_config


async def fails(awaitable: object, code: grpc.StatusCode, *fragments: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await awaitable  # type: ignore[misc]
    assert raised.value.code() == code
    for fragment in fragments:
        assert fragment in (raised.value.details() or "")


async def health_of(channel: grpc.aio.Channel, service: str = SERVICE) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=240)).status)


async def test_a_worker_is_brought_up_and_answers(channel: grpc.aio.Channel) -> None:
    caller = Caller(channel)
    assert (await caller.status()).state == "started"
    device = await caller.init_device()
    assert device.device.startswith("cpu")
    assert device.total_memory_bytes > 1 << 30
    assert (await caller.status()).state == "device"
    progress = await caller.load_model()
    info = progress[-1].model_info
    assert progress[-1].loaded_bytes == progress[-1].total_bytes > 0
    again = await caller.load_model()
    assert again[-1].model_info == info
    assert again[-1].total_bytes == 0, "the weights are there: nothing is read"
    assert (info.architecture, info.vocab_size, info.max_model_len, info.num_layers) == (
        "LlamaForCausalLM",
        3072,
        128,
        7,
    )
    assert list(info.eos_token_ids) == [0, 2]
    directory = resolve_model("pagoda-tiny")
    assert isinstance(directory, Path)
    assert json.loads(info.generation_config_json) == json.loads((directory / "generation_config.json").read_text())
    assert (await caller.status()).state == "loaded"
    blocks = await caller.determine()
    assert blocks.num_blocks == 8 * 128 // 16
    assert blocks.num_cpu_blocks == (1 << 20) // blocks.block_bytes
    assert await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await health_of(channel, LIVENESS) == health_pb2.HealthCheckResponse.SERVING
    assert await caller.initialize_cache() > 0
    assert await caller.initialize_cache(num_cpu_blocks=0) == 0
    assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
    assert len(tokens_of(await caller.execute(caller.prefill(new_request())))) == 1
    status = await caller.status()
    assert (status.state, status.last_step, status.num_blocks, status.session_epoch) == ("serving", 1, 40, 1)
    assert status.model_info.model == "pagoda-tiny"


async def test_stages_out_of_order_are_refused(channel: grpc.aio.Channel) -> None:
    caller, refused = Caller(channel), grpc.StatusCode.FAILED_PRECONDITION
    await fails(caller.load_model(), refused, "session_epoch is 1", "call InitDevice first")
    await caller.init_device()
    await fails(caller.determine(), refused, "call LoadModel first")
    await fails(caller.initialize_cache(), refused, "call LoadModel first")
    await caller.load_model()
    await fails(caller.execute(caller.prefill(new_request())), refused, "call InitializeCache first")


async def test_a_newer_scheduler_takes_over_and_finds_the_weights_in_place(
    caller: Caller, channel: grpc.aio.Channel, served: Served
) -> None:
    first = tokens_of(await caller.execute(caller.prefill(new_request())))
    weights = served.worker._model
    successor = Caller(channel, epoch=5)
    await successor.bring_up()
    assert served.worker._model is weights
    assert tokens_of(await successor.execute(successor.prefill(new_request()))) == first
    refused = grpc.StatusCode.FAILED_PRECONDITION
    await fails(caller.execute(caller.request([0])), refused, "session_epoch is 1, must be 5")
    await fails(caller.init_device(), refused, "session_epoch is 1, must be at least 5")
    await fails(caller.initialize_cache(), refused, "must be 5")
    assert len(tokens_of(await successor.execute(successor.request([0])))) == 1


async def test_a_higher_epoch_must_introduce_itself(caller: Caller) -> None:
    caller.epoch = 9
    await fails(
        caller.execute(caller.prefill(new_request())), grpc.StatusCode.FAILED_PRECONDITION, "must be 1: call InitDevice"
    )


async def test_another_incarnation_is_refused_with_the_right_one(caller: Caller) -> None:
    right, caller.incarnation = caller.incarnation, 17
    await fails(
        caller.execute(caller.prefill(new_request())), grpc.StatusCode.FAILED_PRECONDITION, f"17, must be {right}"
    )


async def test_the_same_scheduler_may_begin_again(caller: Caller) -> None:
    await caller.execute(caller.prefill(new_request()))
    await caller.bring_up()
    assert len(tokens_of(await caller.execute(caller.prefill(new_request())))) == 1


async def test_another_config_loads_another_model(caller: Caller, served: Served) -> None:
    await caller.init_device(max_model_len=64)
    assert (await caller.status()).state == "device"
    assert (await caller.load_model())[-1].model_info.max_model_len == 64


@pytest.mark.parametrize(
    ("changes", "code", "fragment"),
    [
        ({"model": "/nowhere"}, grpc.StatusCode.FAILED_PRECONDITION, "not a directory"),
        ({"max_model_len": 4096}, grpc.StatusCode.INVALID_ARGUMENT, "made for 1024 tokens"),
        ({"dtype": "int3"}, grpc.StatusCode.INVALID_ARGUMENT, "dtype is 'int3'"),
        ({"kv_cache_memory_bytes": 1000}, grpc.StatusCode.RESOURCE_EXHAUSTED, "raise --kv-cache-memory"),
    ],
)
async def test_a_config_that_cannot_be_served_is_refused_with_the_reason(
    channel: grpc.aio.Channel, changes: dict[str, object], code: grpc.StatusCode, fragment: str
) -> None:
    caller = Caller(channel)
    await fails(caller.bring_up(**changes), code, fragment)
    await caller.bring_up()  # and the worker lives on


async def test_a_cache_that_is_too_small_for_the_context_is_no_failure_where_the_context_is_what_fits(
    channel: grpc.aio.Channel,
) -> None:
    caller = Caller(channel)
    await caller.init_device(max_model_len=0, fits_max_model_len=True, kv_cache_memory_bytes=2**20)
    assert (await caller.load_model())[-1].model_info.max_model_len == 1024
    available = await caller.determine()
    assert 0 < available.num_blocks * available.block_bytes <= 2**20
    await caller.init_device(max_model_len=0, fits_max_model_len=True, kv_cache_memory_bytes=1000)
    await caller.load_model()
    await fails(caller.determine(), grpc.StatusCode.RESOURCE_EXHAUSTED, "auto takes what fits")
    await caller.bring_up()


async def test_two_loads_at_once_are_one(channel: grpc.aio.Channel, served: Served) -> None:
    caller = Caller(channel)
    await caller.init_device()
    one, other = await asyncio.gather(caller.load_model(), caller.load_model())
    assert one[-1].model_info == other[-1].model_info


async def test_health_is_answered_while_a_step_runs(
    caller: Caller, channel: grpc.aio.Channel, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begin = threading.Event(), served.worker.begin

    def slow(step: StepInput) -> PendingStep:
        gate.wait(240)
        return begin(step)

    monkeypatch.setattr(served.worker, "begin", slow)
    step = asyncio.create_task(caller.execute(caller.prefill(new_request())))
    await asyncio.sleep(0.05)
    assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
    assert not step.done()
    gate.set()
    assert len(tokens_of(await step)) == 1


async def test_a_worker_whose_blocks_are_counted_serves_no_more(caller: Caller, channel: grpc.aio.Channel) -> None:
    assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
    await caller.determine()
    assert await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_cache_of_a_scheduler_that_was_replaced_meanwhile_is_not_served(
    caller: Caller, channel: grpc.aio.Channel, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, has_begun, initialize = threading.Event(), threading.Event(), served.worker.initialize_cache

    def slow(**blocks: int) -> int:
        has_begun.set()
        gate.wait(240)
        return initialize(**blocks)

    monkeypatch.setattr(served.worker, "initialize_cache", slow)
    older = asyncio.create_task(caller.initialize_cache())
    assert await asyncio.to_thread(has_begun.wait, 240)
    newer = asyncio.create_task(Caller(channel, epoch=2).init_device())
    await until(lambda: served.servicer.fence.session_epoch == 2)
    gate.set()
    await fails(older, grpc.StatusCode.FAILED_PRECONDITION, "session_epoch is 1, must be 2")
    await newer
    assert await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_new_scheduler_ends_the_wait_for_ranks_of_the_one_before(
    channel: grpc.aio.Channel, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "CONNECT_TIMEOUT_S", 3600.0)
    served.worker.parallel = tensor_parallel.TensorParallel(rank=1, world_size=2)
    older, newer = Caller(channel), Caller(channel, epoch=2)
    request = worker_pb2.InitDeviceRequest(
        session_epoch=1, config=worker_config(), rendezvous_address=f"127.0.0.1:{free_port()}#{bytes(32).hex()}"
    )
    await older.stub.InitDevice(request, timeout=240)
    loading = older.stub.LoadModel(worker_pb2.LoadModelRequest(session_epoch=1), timeout=240)
    assert (await loading.read()).total_bytes == 0  # rank 0 does not come
    await newer.init_device()
    await fails(loading.read(), grpc.StatusCode.UNAVAILABLE, "rank 1 could not meet the other ranks")
