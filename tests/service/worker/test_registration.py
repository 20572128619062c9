"""A worker stays registered, whichever process starts first and whichever ends."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.process.children import free_port
from pagoda_common.rpc.service import RpcServer
from pagoda_worker.rpc import registration
from pagoda_worker.rpc.registration import Registration
from tests.service.worker.conftest import until


class Listener(scheduler_pb2_grpc.SchedulerServicer):
    """The scheduler's ear."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.heard: asyncio.Queue[scheduler_pb2.WorkerRegistration] = asyncio.Queue()

    async def RegisterWorker(
        self, request_iterator: AsyncIterator[scheduler_pb2.WorkerRegistration], context: Any
    ) -> AsyncIterator[scheduler_pb2.RegisterWorkerResponse]:
        yield scheduler_pb2.RegisterWorkerResponse(session_epoch=self.epoch, can_leave=True)
        async for message in request_iterator:
            self.heard.put_nowait(message)

    async def next(self) -> scheduler_pb2.WorkerRegistration:
        return await asyncio.wait_for(self.heard.get(), 240)


async def listen(port: int, epoch: int) -> tuple[Listener, RpcServer]:
    listener, server = Listener(epoch), RpcServer(services=("pagoda.v1.Scheduler",))
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(listener, server.grpc_server)
    await server.start(host="127.0.0.1", port=port)
    return listener, server


async def test_a_worker_registers_again_with_every_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "HEARTBEAT_PERIOD_S", 0.02)
    port = free_port()
    identity = scheduler_pb2.WorkerIdentity(address="here:1", incarnation=7, world_size=1)
    steps = iter(range(1, 1_000_000))
    worker = Registration(scheduler=f"127.0.0.1:{port}", identity=identity, last_step=lambda: next(steps))
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0.1)  # the worker is first
    for epoch in (1, 2):
        listener, server = await listen(port, epoch)
        assert (await listener.next()).identity == identity
        beats = [(await listener.next()).heartbeat.last_step for _ in range(2)]
        assert beats[1] == beats[0] + 1
        await server.stop(grace_s=0)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_pauses_grow_up_to_a_bound_and_are_short_again_after_a_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0.01)

    def refresh(identity: scheduler_pb2.WorkerIdentity) -> None:
        identity.sleep_level += 1

    monkeypatch.setattr(registration, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": pause}))
    port, identity = free_port(), scheduler_pb2.WorkerIdentity(address="here:1", incarnation=7, world_size=1)
    worker = Registration(scheduler=f"127.0.0.1:{port}", identity=identity, last_step=lambda: 0, refresh=refresh)
    running = asyncio.create_task(worker.run())
    await until(lambda: len(pauses) > 4)
    assert pauses[:5] == [0.1, 0.2, 0.3, 0.3, 0.3]
    listener, server = await listen(port, epoch=1)
    assert (await listener.next()).identity.sleep_level > 0, "the identity is brought up to date"
    await until(lambda: worker._can_leave)
    num_before = len(pauses)
    await server.stop(grace_s=0)
    await until(lambda: len(pauses) > num_before + 2)
    assert pauses[num_before : num_before + 3] == [0.1, 0.2, 0.3]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
