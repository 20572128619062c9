"""What an engine's client knows of its scheduler: readiness, losses, reasons, adapters; and what it passes on."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.engine import client as engine_client
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.errors import InvalidRequest, NotFound, NotReady
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.sampling_params import SamplingParams


class Session:
    """Records its calls."""

    num_outgoing = 0

    def __init__(self) -> None:
        self.told: list[Any] = []

    def submit(self, stream: Any) -> None:
        self.told.append(("submit", stream.request.request_id))

    def stop(self, request_id: str, index: int) -> None:
        self.told.append(("stop", request_id, index))

    def abort(self, request_id: str) -> None:
        self.told.append(("abort", request_id))

    def forget(self, request_id: str) -> None:
        self.told.append(("forget", request_id))

    def release(self, request_id: str) -> None:
        self.told.append(("release", request_id))


class Control:
    """Takes adapters, or does not find them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None

    async def add_lora(self, adapter: LoraAdapter, *, load_inplace: bool) -> LoraAdapter:
        self.calls.append((adapter, load_inplace))
        if self.error is not None:
            raise self.error
        return LoraAdapter(name=adapter.name, path="found", version=7)

    async def remove_lora(self, name: str) -> None:
        self.calls.append(name)


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def client(session: Session) -> EngineClient:
    """Connected to a scheduler that does not serve yet."""
    made = EngineClient(address="127.0.0.1:1")
    made._open(cast("Any", session))
    return made


def tell(client: EngineClient, **load: Any) -> None:
    client._take_state(scheduler_pb2.SchedulerMessage(load=types_pb2.EngineLoad(**load)))


def request(name: str = "a", **fields: Any) -> EngineRequest:
    return EngineRequest(
        **{"request_id": name, "prompt_token_ids": [1], "sampling_params": SamplingParams(seed=5), **fields}
    )


async def test_it_is_ready_as_the_load_says(client: EngineClient) -> None:
    assert (client.is_connected, client.is_ready, client.not_ready_reason) == (True, False, "the engine is starting")
    tell(client, not_ready_reason="no worker")
    assert client.not_ready_reason == "no worker"
    with pytest.raises(NotReady, match="not ready after 0 s: no worker") as caught:
        await client.wait_until_ready(0)
    assert caught.value.retry_after_s == 1
    tell(client, is_ready=True, num_running_reqs=3)
    assert (client.is_ready, client.not_ready_reason, client.load.num_running_reqs) == (True, "", 3)
    await client.wait_until_ready(0)
    tell(client, not_ready_reason="lost")
    assert not client.is_ready
    with pytest.raises(NotReady, match="lost"):
        await client.wait_until_ready(0)


async def test_it_says_where_it_connects_to_before_it_has() -> None:
    client = EngineClient(address="127.0.0.1:1", frontend_id="mine")
    assert (client.frontend_id, client.is_connected, client.is_ready) == ("mine", False, False)
    assert client.not_ready_reason == "connecting to the scheduler at 127.0.0.1:1"
    assert len(EngineClient(address="127.0.0.1:1").frontend_id) == 16
    with pytest.raises(NotReady, match="connecting") as caught:
        client.submit(request())
    assert caught.value.retry_after_s == 1
    with pytest.raises(NotReady, match="connecting"):
        _ = client.control
    with pytest.raises(NotReady, match="connecting"):
        await client.adopt("key")
    assert await client.metrics_text() == b""
    client.release("a")


async def test_a_sleeping_engine_is_connected_and_not_ready(client: EngineClient) -> None:
    assert not client.is_sleeping
    for level in (1, 2):
        tell(client, sleep_level=level, not_ready_reason="it sleeps")
        assert (client.is_sleeping, client.is_ready) == (True, False)
    client._session = None
    assert not client.is_sleeping


async def test_a_loss_counts_from_a_scheduler_that_served(
    client: EngineClient, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(engine_client.time, "monotonic", lambda: now)
    client._lose(NotReady("starting"))
    assert (client.num_losses, client.lost_for_s) == (1, None), "it never served"
    tell(client, is_ready=True)
    client._lose(NotReady("gone"))
    now = 103.0
    assert (client.num_losses, client.lost_for_s) == (2, 3.0)
    client._session = None
    assert client.not_ready_reason == "no connection to the scheduler at 127.0.0.1:1: gone"
    client._lose(NotReady("again"))
    assert (client.num_losses, client.lost_for_s) == (2, 3.0), "no session was open"
    client._open(cast("Any", session))
    tell(client)
    assert client.lost_for_s == 3.0, "it is there and does not serve"
    tell(client, sleep_level=1)
    assert client.lost_for_s is None
    tell(client, is_ready=True)
    client._lose(NotReady("gone"))
    tell(client, is_ready=True)
    assert client.lost_for_s is None


async def test_what_is_told_once_stays(client: EngineClient) -> None:
    assert (client.model_info, client.model_summary, client.loras, client.resolves_loras) == (None, None, {}, False)
    adapters = [types_pb2.LoraAdapter(name=name, path="p", version=3) for name in ("one", "two")]
    message = scheduler_pb2.SchedulerMessage(
        model_info=types_pb2.ModelInfo(model="m", vocab_size=9),
        loras=scheduler_pb2.LoraList(adapters=adapters, has_resolver=True),
    )
    client._take_state(message)
    tell(client, is_ready=True)
    assert client.model_info is not None
    assert client.model_summary is not None
    assert (client.model_info.model, client.model_summary.vocab_size) == ("m", 9)
    assert client.loras == {name: LoraAdapter(name=name, path="p", version=3) for name in ("one", "two")}
    assert client.resolves_loras
    client._take_state(scheduler_pb2.SchedulerMessage(loras=scheduler_pb2.LoraList(adapters=adapters[:1])))
    assert (set(client.loras), client.resolves_loras) == ({"one"}, False)


async def test_adapters_may_be_named_as_soon_as_they_are_added(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control()
    monkeypatch.setattr(EngineClient, "control", control)
    given, added = LoraAdapter(name="one", path="p"), LoraAdapter(name="one", path="found", version=7)
    assert await client.add_lora(given, load_inplace=True) == added
    assert client.loras == {"one": added}
    await client.remove_lora("one")
    await client.remove_lora("unknown")
    assert client.loras == {}
    assert control.calls == [(given, True), "one", "unknown"]


async def test_an_adapter_is_looked_for_where_the_scheduler_can(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control()
    monkeypatch.setattr(EngineClient, "control", control)
    assert await client.resolve_lora("one") is None
    assert control.calls == []
    client._take_state(scheduler_pb2.SchedulerMessage(loras=scheduler_pb2.LoraList(has_resolver=True)))
    assert await client.resolve_lora("one") == LoraAdapter(name="one", path="found", version=7)
    assert control.calls == [(LoraAdapter(name="one"), False)]
    control.error = NotFound("none")
    assert await client.resolve_lora("two") is None
    control.error = NotReady("away")
    with pytest.raises(NotReady):
        await client.resolve_lora("two")


async def test_requests_are_passed_on_and_forgotten_when_they_end(client: EngineClient, session: Session) -> None:
    stream = client.submit(request(sampling_params=SamplingParams(n=2, seed=5)))
    assert stream.request.sampling_params.seed == 5
    with pytest.raises(InvalidRequest, match="request_id 'a' is in use") as caught:
        client.submit(request())
    assert caught.value.field == "request_id"
    stream.stop(0)
    assert client.num_open_requests == 1
    stream.stop(1)
    assert client.num_open_requests == 0
    client.submit(request("b"))
    client.abort("b")
    client.abort("unknown")
    client.release("c")
    assert client.num_open_requests == 0
    assert session.told == [
        ("submit", "a"),
        ("stop", "a", 0),
        ("stop", "a", 1),
        ("forget", "a"),
        ("submit", "b"),
        ("abort", "b"),
        ("forget", "b"),
        ("release", "c"),
    ]


async def test_a_seed_is_drawn_for_a_request_without_one(client: EngineClient) -> None:
    params = SamplingParams(max_tokens=3)
    first, second = (client.submit(request(name, sampling_params=params)) for name in "ab")
    seeds = {stream.request.sampling_params.seed for stream in (first, second)}
    assert len(seeds) == 2
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)
    assert params.seed is None, "the caller's own stay as they are"
    assert first.request.sampling_params.max_tokens == 3
    assert client.submit(request("c", sampling_params=SamplingParams(seed=0))).request.sampling_params.seed == 0


async def test_what_is_open_is_submitted_to_the_next_session(client: EngineClient) -> None:
    for name in "ab":
        client.submit(request(name))
    client._session, new = None, Session()
    client.submit(request("c"))
    client._open(cast("Any", new))
    assert new.told == [("submit", "a"), ("submit", "b"), ("submit", "c")]


async def test_closing_tells_those_who_wait(client: EngineClient) -> None:
    stream = client.submit(request())
    client._ready.clear()
    waiting = asyncio.create_task(client.wait_until_ready())
    await asyncio.sleep(0)
    client._session = None
    await client.close("the end")
    with pytest.raises(NotReady, match="the end") as caught:
        await waiting
    assert caught.value.retry_after_s == 1
    with pytest.raises(NotReady, match="the end"):
        await stream.get()
    with pytest.raises(NotReady, match="the end"):
        client.submit(request("b"))
    assert client.num_open_requests == 0


async def test_calls_carry_their_time_limits(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Stub:
        def __init__(self, channel: object) -> None:
            assert channel == "channel"

        async def GetMetrics(self, _: object, *, timeout: float) -> Any:
            asked.append(("metrics", timeout))
            return SimpleNamespace(text=b"a 1\n")

        async def Adopt(self, message: Any, *, timeout: float) -> Any:
            asked.append((message.resume_key, timeout))
            submitted = scheduler_pb2.SubmitRequest(request_id="r", attempt=3)
            return scheduler_pb2.AdoptResponse(requests=[scheduler_pb2.AdoptedRequest(submitted=submitted)])

    monkeypatch.setattr(engine_client.scheduler_pb2_grpc, "SchedulerStub", Stub)
    client._connection = cast("Any", SimpleNamespace(channel="channel", address="here"))
    assert await client.metrics_text() == b"a 1\n"
    assert [(one.request_id, one.attempt) for one in await client.adopt("key")] == [("r", 3)]
    assert asked == [("metrics", 2.0), ("key", 10.0)]
    client._session = None
    assert await client.metrics_text() == b""
