"""What a gRPC call is before it asks the engine for anything: its id, its tenant, what it holds, and its time."""

import base64
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda.v1 import inference_pb2, types_pb2
from pagoda_common.errors import InvalidRequest, NotFound, QueueFull
from pagoda_common.rpc.bearer import BearerKeys, key_id
from pagoda_common.version import VERSION
from pagoda_frontend.budget.caller import caller, current_hold
from pagoda_frontend.budget.held_memory import HeldMemory
from pagoda_frontend.grpc import servicer as servicers
from pagoda_frontend.grpc.servicer import MESSAGE_FACTOR, InferenceServicer, _encoded, _refuse_resume_from, _usage


class Context:
    """A call of a peer."""

    def __init__(self, *metadata: Any, peer: str = "ipv4:10.0.0.7:5000", time_s: float | None = None) -> None:
        self._metadata, self._peer, self._time_s = metadata, peer, time_s
        self.at_end: list[Any] = []

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        return self._time_s

    def add_done_callback(self, call: Any) -> None:
        self.at_end.append(call)

    def end(self) -> None:
        for call in self.at_end:
            call(self)


class Serving:
    """What a servicer asks of a frontend."""

    def __init__(self, *, keys: tuple[str, ...] = (), max_bytes: int = 10**6) -> None:
        self.held_memory = HeldMemory(max_bytes=max_bytes)
        self.api_keys = BearerKeys(keys)
        self.has_api_keys = bool(keys)
        self.told: list[Any] = []
        self.open: set[tuple[str, str]] = set()
        self.started_s = 90.0

    def begin_call(self) -> None:
        self.told.append("begin")

    def end_call(self) -> None:
        self.told.append("end")

    def is_open(self, request_id: str, *, tenant: str) -> bool:
        return (request_id, tenant) in self.open

    def abort(self, request_id: str, *, tenant: str) -> bool:
        self.told.append((request_id, tenant))
        return (request_id, tenant) in self.open


def made(serving: Serving, **engine: Any) -> InferenceServicer:
    return InferenceServicer(serving=cast("Any", serving), engine=cast("Any", SimpleNamespace(**engine)))


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="x" * 100, **fields)


def call(serving: Serving, asked: Any, context: Context) -> Any:
    return made(serving)._call(asked, cast("Any", context), "gen-")


def test_a_call_has_its_id_priority_and_time() -> None:
    serving, context = Serving(), Context(time_s=2.5)
    begun = call(serving, request(request_id="mine", priority=-3), context)
    assert (begun.request_id, begun.priority, begun.timeout_s) == ("mine", -3, 2.5)
    assert serving.told == ["begin"]
    context.end()
    assert serving.told == ["begin", "end"]
    drawn = call(serving, request(), Context())
    assert drawn.request_id.startswith("gen-")
    assert len(drawn.request_id) > 20
    assert drawn.timeout_s == 0.0


def test_what_a_message_holds_until_its_call_is_over() -> None:
    serving, context, asked = Serving(), Context(), request()
    call(serving, asked, context)
    hold = current_hold.get()
    assert hold is not None
    assert hold.num_bytes == MESSAGE_FACTOR * asked.ByteSize() == serving.held_memory.num_bytes
    assert (hold.owner, caller.get()) == ("10.0.0.7", "10.0.0.7")
    context.end()
    assert serving.held_memory.num_bytes == 0
    with pytest.raises(QueueFull):
        call(Serving(max_bytes=10), asked, Context())


@pytest.mark.parametrize(("peer", "owner"), [("ipv6:%5B2001:db8::1%5D:5000", "2001:db8::/64"), ("unix:", ""), ("", "")])
def test_whose_share_a_call_has(peer: str, owner: str) -> None:
    call(Serving(), request(), Context(peer=peer))
    assert caller.get() == owner


def test_a_key_is_a_tenant() -> None:
    serving = Serving(keys=("key", "other"))
    context = Context(("authorization", "Bearer other"))
    begun = call(serving, request(), context)
    assert begun.tenant == caller.get() == key_id("other")
    plain = call(Serving(), request(), Context(("x-tenant", b"x")))
    assert plain.tenant != key_id("other")
    with pytest.raises(AssertionError, match="the guard has let the call in"):
        call(serving, request(), Context())


def test_ids_have_a_bound_and_are_in_use_for_their_tenant() -> None:
    serving = Serving(keys=("key", "other"))
    serving.open = {("taken", key_id("key"))}
    key, other = Context(("authorization", "Bearer key")), Context(("authorization", "Bearer other"))
    assert call(serving, request(request_id="taken"), other).request_id == "taken"
    with pytest.raises(InvalidRequest) as caught:
        call(serving, request(request_id="taken"), key)
    assert (str(caught.value), caught.value.field) == ("request_id 'taken' is in use", "request_id")
    assert len(call(serving, request(request_id="a" * 128), key).request_id) == 128
    with pytest.raises(InvalidRequest) as caught:
        call(serving, request(request_id="a" * 129), key)
    told = "request_id has 129 characters, at most 128 are allowed"
    assert (str(caught.value), caught.value.field) == (told, "request_id")


async def test_what_is_not_open_is_not_aborted() -> None:
    serving = Serving(keys=("key",))
    tenant = key_id("key")
    serving.open = {("a", tenant)}
    context = cast("Any", Context(("authorization", "Bearer key")))
    await made(serving).Abort(inference_pb2.AbortGenerationRequest(request_ids=["a"]), context)
    for ids, told in (
        (["b"], "request 'b' is not open at this frontend"),
        (["b", "a", "c"], "request 'b' and 1 more is not open at this frontend"),
        (["x" * 129], f"request '{'x' * 128}' is not open at this frontend"),
    ):
        with pytest.raises(NotFound) as caught:
            await made(serving).Abort(inference_pb2.AbortGenerationRequest(request_ids=ids), context)
        assert (str(caught.value), caught.value.field) == (told, "request_ids")
    assert serving.told[:4] == [("a", tenant), ("b", tenant), ("b", tenant), ("a", tenant)], "all are tried"


async def test_facts_of_model_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicers.time, "monotonic", lambda: 100.0)
    serving = Serving()
    load = types_pb2.EngineLoad(num_running_reqs=3)
    servicer = made(serving, load=load, model_info=types_pb2.ModelInfo(vocab_size=7))
    server = await servicer.GetServerInfo(inference_pb2.GetServerInfoRequest(), cast("Any", None))
    assert (server.version, server.uptime_s, server.load) == (VERSION, 10.0, load)
    cast("Any", serving).model_named = lambda name: SimpleNamespace(names=("m", name))
    model = await servicer.GetModelInfo(inference_pb2.GetModelInfoRequest(model="n"), cast("Any", None))
    assert (model.model_info.vocab_size, list(model.served_model_names)) == (7, ["m", "n"])


def test_a_place_to_go_on_from_goes_with_streams() -> None:
    _refuse_resume_from(request())
    with pytest.raises(InvalidRequest) as caught:
        _refuse_resume_from(request(resume_from={"request_id": "a"}))
    told = "resume_from needs a streaming call, this call is unary"
    assert (str(caught.value), caught.value.field) == (told, "resume_from")


def test_usage_and_notes() -> None:
    run = cast("Any", SimpleNamespace(num_prompt_tokens=3, num_cached_tokens=2, num_output_tokens=9))
    usage = _usage(run, 4)
    assert (usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens) == (3, 4, 2)
    asked = request(model="é")
    assert inference_pb2.GenerateRequest.FromString(base64.b64decode(_encoded(asked))) == asked
