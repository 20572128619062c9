"""Sessions that break: how long the client pauses before the next, where it goes, and what it tells its requests."""

from collections.abc import Callable
from typing import Any

import pytest

from pagoda_common.engine import client as engine_client
from pagoda_common.engine.client import MAX_BACKOFF_S, MIN_BACKOFF_S, STABLE_S, EngineClient, EngineRequest
from pagoda_common.errors import DeadlineExceeded, NotReady
from pagoda_common.params.sampling_params import SamplingParams


class Clock:
    """Stands still, but for what sessions live and the client sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now


class Sessions:
    """Makes sessions that live for the seconds of `lives` and break; after the last the client is closed."""

    def __init__(self, clock: Clock, lives: list[float]) -> None:
        self.clock = clock
        self.lives = lives
        self.client: EngineClient | None = None
        self.addresses: list[str] = []
        self.opens = False
        self.before_end: Callable[[], None] = lambda: None

    def __call__(self, **options: Any) -> "Sessions":
        self.on_open = options["on_open"]
        return self

    num_outgoing = 0

    def submit(self, stream: Any) -> None:
        """Takes it and says nothing."""

    def forget(self, request_id: str) -> None:
        """As above."""

    def abort(self, request_id: str) -> None:
        """As above."""

    async def run(self) -> None:
        assert self.client is not None
        self.addresses.append(self.client.address)
        if self.opens:
            self.on_open(self)
        self.clock.now += self.lives.pop(0)
        if not self.lives:
            self.client._is_closed = True
        self.before_end()
        raise NotReady("lost")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.pauses.append(seconds)

    monkeypatch.setattr(engine_client.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(engine_client.asyncio, "sleep", sleep)
    monkeypatch.setattr(engine_client.random, "uniform", lambda low, high: high)
    return clock


async def run(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, lives: list[float], address: str = "127.0.0.1:1"
) -> Sessions:
    """Run a client through sessions of these lengths."""
    sessions = Sessions(clock, lives)
    monkeypatch.setattr(engine_client, "EngineSession", sessions)
    sessions.client = EngineClient(address=address)
    await sessions.client._run()
    await sessions.client.close()
    return sessions


async def test_pauses_double_up_to_their_bound(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    await run(clock, monkeypatch, [0.0] * 40)
    assert clock.pauses[:4] == pytest.approx([MIN_BACKOFF_S, 2 * MIN_BACKOFF_S, 4 * MIN_BACKOFF_S, MAX_BACKOFF_S])
    assert len(clock.pauses) == 39
    assert max(clock.pauses) == MAX_BACKOFF_S
    assert min(clock.pauses) == MIN_BACKOFF_S


async def test_a_session_that_lived_long_enough_forgets_the_pauses(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(clock, monkeypatch, [0.0] * 5 + [STABLE_S] + [STABLE_S * 1.01] + [0.0, 0.0])
    assert clock.pauses[5] == MAX_BACKOFF_S, "exactly that long is not longer"
    assert clock.pauses[6:] == pytest.approx([MIN_BACKOFF_S, 2 * MIN_BACKOFF_S])


async def test_pauses_are_spread_over_half_of_their_length(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client.random, "uniform", lambda low, high: low)
    await run(clock, monkeypatch, [0.0] * 4)
    assert clock.pauses == pytest.approx([MIN_BACKOFF_S / 2, MIN_BACKOFF_S, 2 * MIN_BACKOFF_S])


async def test_several_addresses_are_tried_in_turn(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = await run(clock, monkeypatch, [0.0] * 5, "127.0.0.1:1, 127.0.0.1:2,127.0.0.1:3")
    assert [address[-1] for address in sessions.addresses] == ["1", "2", "3", "1", "2"]


async def test_only_sessions_that_were_open_count_as_lost(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = await run(clock, monkeypatch, [0.0] * 3)
    assert sessions.client is not None
    assert sessions.client.num_losses == 0
    sessions = Sessions(clock, [0.0] * 3)
    sessions.opens = True
    monkeypatch.setattr(engine_client, "EngineSession", sessions)
    sessions.client = EngineClient(address="127.0.0.1:1")
    await sessions.client._run()
    assert sessions.client.num_losses == 3
    assert not sessions.client.is_connected
    assert "no connection to the scheduler at 127.0.0.1:1: lost" in sessions.client.not_ready_reason
    await sessions.client.close()


async def test_a_request_whose_time_is_over_is_not_taken_to_the_next_session(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Sessions(clock, [0.0])
    sessions.opens = True
    monkeypatch.setattr(engine_client, "EngineSession", sessions)
    client = sessions.client = EngineClient(address="127.0.0.1:1")
    client._was_connected = True
    params = SamplingParams()
    streams = [
        client.submit(EngineRequest(request_id=name, prompt_token_ids=[1], sampling_params=params, timeout_s=timeout_s))
        for name, timeout_s in (("short", 5.0), ("long", 50.0), ("endless", 0.0))
    ]
    sessions.before_end = lambda: setattr(clock, "now", clock.now + 10)
    await client._run()
    assert set(client._streams) == {"long", "endless"}
    with pytest.raises(DeadlineExceeded, match="within 5 s"):
        await streams[0].get()
    assert streams[1].remaining_s == pytest.approx(40.0)
    assert streams[2].remaining_s == 0.0
    await client.close()


async def test_messages_that_wait_to_be_written_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    client = EngineClient(address="127.0.0.1:1")
    client._was_connected = True
    session: Any = Sessions(Clock(), [])
    client._session = session
    request = EngineRequest(request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams())
    session.num_outgoing = 65_535
    client.submit(request)
    session.num_outgoing = 65_536
    with pytest.raises(engine_client.QueueFull, match="65536 messages wait"):
        client.submit(EngineRequest(request_id="b", prompt_token_ids=[1], sampling_params=SamplingParams()))
    assert client.num_open_requests == 1
    client._session = None
    await client.close()


def test_what_waits_for_a_client_is_a_matter_of_seconds() -> None:
    assert (MIN_BACKOFF_S, MAX_BACKOFF_S, STABLE_S) == (0.05, 0.3, 1.0)
