"""The gRPC service of several models: every call of the contract reaches the servicer of the model that it names."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda.v1 import inference_pb2, types_pb2
from pagoda_common.errors import InvalidRequest, NotFound
from pagoda_frontend.grpc.shared_servicer import SharedServicer

RPCS = list(inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods)
BY_MODEL = [rpc for rpc in RPCS if "model" in rpc.input_type.fields_by_name]


class Servicer:
    """Notes what it is asked, and says who it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []
        self.num_closed = 0

    def __getattr__(self, rpc: str) -> Any:
        async def answer(request: Any, context: Any) -> str:
            self.asked.append(rpc)
            return self.name

        async def stream(request: Any, context: Any) -> AsyncGenerator[str]:
            self.asked.append(rpc)
            try:
                yield self.name
                yield self.name
            finally:
                self.num_closed += 1

        return stream if rpc in ("Generate", "Chat") else answer


class Models:
    """Knows a and b; b holds the stream `kept`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.servings = [
            SimpleNamespace(
                name=name,
                has_api_keys=False,
                begin_call=lambda: self.calls.append("begin"),
                end_call=lambda: self.calls.append("end"),
                abort=lambda request_id, *, tenant, name=name: request_id.startswith(name) and tenant == "",
            )
            for name in ("a", "b")
        ]
        self.first = self.servings[0]

    async def named(self, name: str) -> Any:
        if not name:
            raise InvalidRequest("none is named")
        return self.servings["ab".index(name)]

    async def holding(self, key: str) -> Any:
        return self.servings[key == "kept"]


@pytest.fixture
def made() -> tuple[SharedServicer, Models, list[Servicer]]:
    models, servicers = Models(), [Servicer("a"), Servicer("b")]
    return SharedServicer(models=cast("Any", models), servicers=cast("Any", servicers)), models, servicers


async def ask(shared: SharedServicer, rpc: Any, request: Any) -> list[str]:
    called = getattr(shared, rpc.name)(request, None)
    return [part async for part in called] if rpc.server_streaming else [await called]


@pytest.mark.parametrize("rpc", BY_MODEL, ids=lambda rpc: str(rpc.name))
async def test_a_call_reaches_the_model_that_it_names(rpc: Any, made: Any) -> None:
    shared, models, (one, two) = made
    message = getattr(inference_pb2, rpc.input_type.name)
    for name in ("a", "b"):
        assert set(await ask(shared, rpc, message(model=name))) == {name}
    assert one.asked == two.asked == [rpc.name]
    assert models.calls == ["begin", "end"] * 2, "a drain waits while the model is looked for"
    with pytest.raises(InvalidRequest):
        await ask(shared, rpc, message())
    assert models.calls == ["begin", "end"] * 3
    if rpc.server_streaming:
        assert (one.num_closed, two.num_closed) == (1, 1)


@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if rpc.server_streaming], ids=lambda rpc: str(rpc.name))
async def test_a_stream_is_resumed_at_the_model_that_holds_it(rpc: Any, made: Any) -> None:
    shared, _, (_, two) = made
    message = getattr(inference_pb2, rpc.input_type.name)
    for key, model, expected in (("kept", "", "b"), ("other", "", "a"), ("kept", "a", "a")):
        resume_from = inference_pb2.ResumeFrom(request_id=key)
        assert await ask(shared, rpc, message(model=model, resume_from=resume_from)) == [expected] * 2
    stream = getattr(shared, rpc.name)(message(model="b"), None)
    assert await anext(stream) == "b"
    await stream.aclose()
    assert two.num_closed == 2, "a stream that its client leaves is closed within"


async def test_every_call_is_for_one_model_or_for_all() -> None:
    assert {rpc.name for rpc in RPCS} - {rpc.name for rpc in BY_MODEL} == {"Abort", "GetServerInfo"}
    assert all(rpc.name in vars(SharedServicer) for rpc in RPCS)


async def test_requests_are_aborted_whatever_their_model(made: Any) -> None:
    shared, _, _ = made
    context = cast("Any", SimpleNamespace(invocation_metadata=lambda: ()))
    await shared.Abort(inference_pb2.AbortGenerationRequest(request_ids=["a1", "b1"]), context)
    with pytest.raises(NotFound, match="request 'c' and 1 more is not open at this frontend"):
        await shared.Abort(inference_pb2.AbortGenerationRequest(request_ids=["a1", "c", "d"]), context)


async def test_the_load_is_that_of_all(made: Any) -> None:
    shared, _, servicers = made
    for number, servicer in enumerate(servicers, start=1):
        load = types_pb2.EngineLoad(num_running_reqs=number, num_total_blocks=10 * number)
        answer = inference_pb2.GetServerInfoResponse(version="v", uptime_s=number, load=load)

        async def told(request: Any, context: Any, answer: Any = answer) -> Any:
            return answer

        servicer.GetServerInfo = told
    info = await shared.GetServerInfo(inference_pb2.GetServerInfoRequest(), None)
    assert (info.version, info.uptime_s, info.load.num_running_reqs, info.load.num_total_blocks) == ("v", 1, 3, 30)
