"""What an operator's calls ask of the scheduler, field by field, and how alike vectors are."""

from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_common.engine.control import EngineControl
from pagoda_common.engine.similarity import SIMILARITIES, late_interaction
from pagoda_common.errors import Code, InvalidRequest, NotFound, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter


class FakeStub:
    """Remembers requests and their time limits, and answers or fails."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, float]] = []
        self.code: grpc.StatusCode | None = None

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any, *, timeout: float) -> Any:
            self.asked.append((name, request, timeout))
            if self.code is not None:
                empty = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(self.code, empty, empty, details="why")
            return SimpleNamespace(
                is_sleeping=True,
                adapter=getattr(request, "adapter", None),
                adapters=[type(scheduler_pb2.AddLoraRequest().adapter)(name=one) for one in ("a", "b")],
            )

        return call


@pytest.fixture
def stub() -> FakeStub:
    return FakeStub()


@pytest.fixture
def control(stub: FakeStub) -> EngineControl:
    made = EngineControl.__new__(EngineControl)
    made._stub = cast("Any", stub)
    return made


async def test_requests_have_every_field(control: EngineControl, stub: FakeStub) -> None:
    keep, abort = scheduler_pb2.SLEEP_MODE_KEEP, scheduler_pb2.SLEEP_MODE_ABORT
    await control.sleep()
    await control.sleep(level=2, mode="abort", group=0)
    await control.wake_up()
    await control.wake_up(tags=["weights"], group=3)
    assert await control.is_sleeping()
    await control.reload_weights("m")
    await control.reload_weights("m", revision="r", group=0)
    await control.remove_lora("a")
    await control.pin_lora("a")
    await control.pin_lora("a", is_pinned=False)
    assert [adapter.name for adapter in await control.list_loras()] == ["a", "b"]
    assert stub.asked == [
        ("Sleep", scheduler_pb2.SleepRequest(level=1, mode=keep), 3600.0),
        ("Sleep", scheduler_pb2.SleepRequest(level=2, mode=abort, group=0), 3600.0),
        ("WakeUp", scheduler_pb2.WakeUpRequest(), 3600.0),
        ("WakeUp", scheduler_pb2.WakeUpRequest(tags=["weights"], group=3), 3600.0),
        ("IsSleeping", scheduler_pb2.IsSleepingRequest(), 10.0),
        ("ReloadWeights", scheduler_pb2.ReloadWeightsRequest(model="m"), 3600.0),
        ("ReloadWeights", scheduler_pb2.ReloadWeightsRequest(model="m", revision="r", group=0), 3600.0),
        ("RemoveLora", scheduler_pb2.RemoveLoraRequest(name="a"), 10.0),
        ("PinLora", scheduler_pb2.PinLoraRequest(name="a", is_pinned=True), 10.0),
        ("PinLora", scheduler_pb2.PinLoraRequest(name="a", is_pinned=False), 10.0),
        ("ListLoras", scheduler_pb2.ListLorasRequest(), 10.0),
    ]


async def test_an_adapter_is_sent_and_comes_back(control: EngineControl, stub: FakeStub) -> None:
    adapter = LoraAdapter(name="a", path="p", base_model_name="b")
    assert await control.add_lora(adapter) == adapter
    await control.add_lora(adapter, load_inplace=True)
    assert [(name, request.load_inplace, limit) for name, request, limit in stub.asked] == [
        ("AddLora", False, 600.0),
        ("AddLora", True, 600.0),
    ]
    asked = stub.asked[0][1].adapter
    assert (asked.name, asked.path, asked.base_model_name) == ("a", "p", "b")


@pytest.mark.parametrize("level", [0, 3])
async def test_a_level_and_a_mode_that_there_are_not(control: EngineControl, stub: FakeStub, level: int) -> None:
    with pytest.raises(InvalidRequest, match=f"level is {level}, must be 1 or 2") as caught:
        await control.sleep(level=level)
    assert caught.value.field == "level"
    with pytest.raises(InvalidRequest, match="mode is 'wait', must be one of keep, abort") as caught:
        await control.sleep(mode="wait")
    assert caught.value.field == "mode"
    assert stub.asked == []


async def test_a_refusal_has_its_code_and_an_unknown_adapter_its_field(control: EngineControl, stub: FakeStub) -> None:
    adapter = LoraAdapter(name="a", path="p")
    of_lora = (lambda: control.add_lora(adapter), lambda: control.remove_lora("a"), lambda: control.pin_lora("a"))
    others = (
        control.sleep,
        control.wake_up,
        control.is_sleeping,
        lambda: control.reload_weights("m"),
        control.list_loras,
    )
    for calls, code, wanted in (
        ((*of_lora, *others), grpc.StatusCode.FAILED_PRECONDITION, Code.FAILED_PRECONDITION),
        ((*of_lora, *others), grpc.StatusCode.UNAVAILABLE, Code.UNAVAILABLE),
    ):
        stub.code = code
        for call in calls:
            with pytest.raises(PagodaError) as caught:
                await cast("Any", call)()
            assert caught.value.code == wanted
    stub.code = grpc.StatusCode.NOT_FOUND
    for call in of_lora:
        with pytest.raises(NotFound) as unknown:
            await cast("Any", call)()
        assert (unknown.value.field, unknown.value.message) == ("lora_name", "why")


@pytest.mark.parametrize(
    ("name", "alike"), [("cosine", 24 / 25), ("dot", 24.0), ("euclidean", -(2**0.5)), ("manhattan", -2.0)]
)
def test_how_alike_two_vectors_are(name: str, alike: float) -> None:
    one, other = np.array([3, 4], dtype=np.float32), np.array([4, 3], dtype=np.float32)
    assert SIMILARITIES[name](one, other) == pytest.approx(alike)
    assert SIMILARITIES["cosine"](one, np.zeros(2, dtype=np.float32)) == 0.0
    assert set(SIMILARITIES) == {"cosine", "dot", "euclidean", "manhattan"}


def test_every_token_of_the_query_has_its_best_match() -> None:
    query, document = np.array([[1, 0], [0, 2]], np.float32), np.array([[3, 1], [1, 4], [2, 0]], np.float32)
    assert late_interaction(query, document) == 3 + 8
