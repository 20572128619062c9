"""Sleep, WakeUp, PrepareWeights and ReloadWeights of a real worker: memory comes and goes, tokens stay as they were."""

import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pagoda.v1 import scheduler_pb2, types_pb2, worker_pb2
from pagoda_common.errors import OutOfMemory
from tests.service.worker.conftest import Caller, Served, new_request, tokens_of, worker_config
from tests.service.worker.test_lifecycle import fails
from tests.weights import cut_short, other_weights, same_weights, with_config, with_header

REFUSED = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(params=["float32", "bfloat16"])
async def caller(request: pytest.FixtureRequest, channel: grpc.aio.Channel) -> Caller:
    """A scheduler whose worker serves; with bfloat16, weights are packed where the CPU can multiply them."""
    made = Caller(channel)
    made.options = {"dtype": request.param}
    await made.bring_up()
    return made


async def sleep(caller: Caller, level: int) -> int:
    request = worker_pb2.WorkerSleepRequest(
        session_epoch=caller.epoch, worker_incarnation=caller.incarnation, level=level
    )
    return int((await caller.stub.Sleep(request, timeout=240)).freed_bytes)


async def wake_up(caller: Caller, **fields: Any) -> None:
    request = worker_pb2.WorkerWakeUpRequest(
        session_epoch=caller.epoch, worker_incarnation=caller.incarnation, **fields
    )
    await caller.stub.WakeUp(request, timeout=240)


async def prepare(caller: Caller, model: Path | None) -> None:
    request = worker_pb2.PrepareWeightsRequest(session_epoch=caller.epoch, worker_incarnation=caller.incarnation)
    if model is not None:
        request.weights.CopyFrom(types_pb2.WeightsSource(model=str(model), version=1))
    async for _ in caller.stub.PrepareWeights(request, timeout=240):
        pass


async def reload(caller: Caller, model: Path) -> None:
    weights = types_pb2.WeightsSource(model=str(model), version=1)
    request = worker_pb2.WorkerReloadWeightsRequest(
        session_epoch=caller.epoch, worker_incarnation=caller.incarnation, weights=weights
    )
    async for _ in caller.stub.ReloadWeights(request, timeout=240):
        pass


async def first_token(caller: Caller) -> list[int]:
    """Of a prompt whose blocks are empty, with a new cache."""
    await caller.determine()
    await caller.initialize_cache()
    return tokens_of(await caller.execute(caller.prefill(new_request())))


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_worker_has_neither_weights_nor_cache_and_wakes_as_it_was(
    caller: Caller, served: Served, level: int
) -> None:
    before = await first_token(caller)
    model, info = served.worker._model, (await caller.status()).model_info
    assert model is not None
    freed = await sleep(caller, level)
    assert freed > info.weight_bytes
    status = await caller.status()
    assert (status.state, status.sleep_level, status.num_blocks) == ("sleeping", level, 0)
    assert all(parameter.is_meta for parameter in model.parameters())
    await fails(caller.execute(caller.request([0])), REFUSED, "call InitializeCache first")
    await wake_up(caller, weights_only=True)
    assert (await caller.status()).state == "sleeping"
    assert not any(parameter.is_meta for parameter in model.parameters())
    await wake_up(caller)
    assert (await caller.status()).state == "loaded"
    assert await first_token(caller) == before


async def test_a_load_wakes_a_sleeping_worker_too(caller: Caller) -> None:
    before = await first_token(caller)
    assert await sleep(caller, 2) > 0
    assert await sleep(caller, 1) == 0
    assert (await caller.status()).sleep_level == 2
    await caller.load_model()
    assert await first_token(caller) == before


async def test_weights_of_a_device_with_memory_of_its_own_wait_in_host_memory(caller: Caller, served: Served) -> None:
    before = await first_token(caller)
    weights = served.worker._weights
    assert weights is not None
    weights._device = _Accelerator()  # type: ignore[assignment]  # as far as the weights look at it
    await sleep(caller, 1)
    assert sum(tensor.numel() * tensor.element_size() for tensor in weights._in_host.values()) == weights.num_bytes
    weights._read = None  # type: ignore[assignment, method-assign]  # nothing is read from disk
    weights._device = torch.device("cpu")
    await wake_up(caller)
    assert not weights._in_host
    assert await first_token(caller) == before


class _Accelerator:
    type = "xpu"


async def test_a_deeper_sleep_frees_the_host_memory_of_the_one_before(caller: Caller, served: Served) -> None:
    before = await first_token(caller)
    weights = served.worker._weights
    assert weights is not None
    weights._device = _Accelerator()  # type: ignore[assignment]  # as far as the weights look at it
    await sleep(caller, 1)
    assert weights._in_host
    await sleep(caller, 2)
    assert not weights._in_host
    weights._device = torch.device("cpu")
    await wake_up(caller)
    assert await first_token(caller) == before


async def test_weights_that_memory_does_not_last_for_leave_nothing_behind(
    caller: Caller, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await first_token(caller)
    weights, model = served.worker._weights, served.worker._model
    assert weights is not None
    assert model is not None
    await sleep(caller, 2)
    read = weights._read_parameters

    def fill_up(*args: Any) -> None:
        read(*args)
        raise OutOfMemory("host memory is full")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_read_parameters", fill_up)
        await fails(wake_up(caller), grpc.StatusCode.RESOURCE_EXHAUSTED, "host memory is full")
    assert all(parameter.is_meta for parameter in model.parameters())
    await wake_up(caller)
    assert await first_token(caller) == before


async def test_a_worker_whose_checkpoint_is_gone_sleeps_on(caller: Caller, tmp_path: Path) -> None:
    directory = same_weights(tmp_path / "model")
    await reload(caller, directory)
    before = await first_token(caller)
    await sleep(caller, 2)
    shutil.move(directory, tmp_path / "elsewhere")
    await fails(wake_up(caller), REFUSED, "is not a directory")
    assert (await caller.status()).state == "sleeping"
    shutil.move(tmp_path / "elsewhere", directory)
    await wake_up(caller)
    assert await first_token(caller) == before


async def test_older_schedulers_and_other_incarnations_are_refused(caller: Caller) -> None:
    caller.incarnation += 1
    for call in (sleep(caller, 1), wake_up(caller), prepare(caller, None), reload(caller, Path("x"))):
        await fails(call, REFUSED, "worker_incarnation is")
    caller.incarnation -= 1
    caller.epoch -= 1
    for call in (sleep(caller, 1), wake_up(caller), prepare(caller, None), reload(caller, Path("x"))):
        await fails(call, REFUSED, "session_epoch is 0, must be 1")
    caller.epoch += 1
    for level in (0, 3):
        await fails(sleep(caller, level), grpc.StatusCode.INVALID_ARGUMENT, f"level is {level}, must be 1 or 2")


async def test_a_sleep_that_is_lighter_than_the_one_before_leaves_the_deeper_one(caller: Caller) -> None:
    await sleep(caller, 2)
    await sleep(caller, 1)
    assert (await caller.status()).sleep_level == 2
    await wake_up(caller)
    assert (await caller.status()).sleep_level == 0


async def test_steps_go_on_while_weights_are_prepared_and_until_they_are_taken(caller: Caller, tmp_path: Path) -> None:
    before = await first_token(caller)
    await prepare(caller, other_weights(tmp_path / "other"))
    assert len(tokens_of(await caller.execute(caller.request([0])))) == 1
    assert await first_token(caller) == before
    await reload(caller, tmp_path / "other")
    status = await caller.status()
    assert (status.state, status.num_blocks) == ("loaded", 0)
    assert status.model_info.weights.model == str(tmp_path / "other")
    after = await first_token(caller)
    assert after != before
    await sleep(caller, 2)
    await wake_up(caller)
    assert await first_token(caller) == after
    await caller.init_device()  # a scheduler that asks for the model's own
    await caller.load_model()
    assert await first_token(caller) == before
    assert not (await caller.status()).model_info.HasField("weights")


async def test_prepared_weights_can_be_forgotten(caller: Caller, served: Served, tmp_path: Path) -> None:
    await prepare(caller, other_weights(tmp_path / "other"))
    assert served.worker._weights is not None
    assert served.worker._weights.prepared_source is not None
    await prepare(caller, None)
    assert served.worker._weights.prepared_source is None
    await prepare(caller, tmp_path / "other")
    await caller.init_device()  # a scheduler that is back does not know of them
    assert served.worker._weights.prepared_source is None


async def test_each_registration_tells_what_the_worker_holds_then(
    caller: Caller, served: Served, tmp_path: Path
) -> None:
    identity = scheduler_pb2.WorkerIdentity()
    await reload(caller, other_weights(tmp_path / "other"))
    await sleep(caller, 2)
    served.servicer.describe_weights(identity)
    assert (identity.sleep_level, identity.weights.model) == (2, str(tmp_path / "other"))
    await caller.init_device()
    await caller.load_model()
    served.servicer.describe_weights(identity)
    assert (identity.sleep_level, identity.HasField("weights")) == (0, False)


async def test_a_fresh_worker_loads_what_it_is_told_to_hold(
    caller: Caller, channel: grpc.aio.Channel, served: Served, tmp_path: Path
) -> None:
    before = await first_token(caller)
    served.worker._release()
    request = worker_pb2.InitDeviceRequest(session_epoch=1)
    request.weights.CopyFrom(types_pb2.WeightsSource(model=str(other_weights(tmp_path / "other")), version=1))
    request.config.CopyFrom(worker_config(**caller.options))
    await caller.stub.InitDevice(request)
    await caller.load_model()
    assert await first_token(caller) != before


def _rename(header: dict[str, Any]) -> None:
    header["model.norm.wait"] = header.pop("model.norm.weight")


def _reshape(header: dict[str, Any]) -> None:
    header["model.layers.3.self_attn.k_proj.weight"]["shape"].reverse()


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda path: path, ["is not a directory"]),
        (lambda path: path.mkdir() or path, ["has no config.json"]),
        (cut_short, ["cannot read", "model.safetensors"]),
        (lambda path: with_config(path, hidden_size=384), ["hidden_size is 384, the served one has 192"]),
        (lambda path: with_config(path, architectures=["Qwen3ForCausalLM"]), ["architecture is 'Qwen3ForCausalLM'"]),
        (lambda path: with_header(path, _rename), ["missing tensors: model.norm.weight"]),
        (lambda path: with_header(path, _reshape), ["model.layers.3.self_attn.k_proj.weight has shape [192, 64]"]),
    ],
    ids=["nowhere", "empty", "cut short", "hidden size", "architecture", "renamed", "reshaped"],
)
async def test_what_does_not_fit_is_refused_by_name_and_the_old_weights_serve_on(
    caller: Caller, tmp_path: Path, make: Any, fragments: list[str]
) -> None:
    directory = make(tmp_path / "new")
    first = await caller.execute(caller.prefill(new_request()))
    assert len(tokens_of(first)) == 1
    for call in (prepare(caller, directory), reload(caller, directory)):
        await fails(call, REFUSED, *fragments)
    assert len(tokens_of(await caller.execute(caller.request([0])))) == 1
