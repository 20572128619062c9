"""Workers that also listen on an abstract socket: called there where it is within reach, else over TCP."""

import sys

import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_common.rpc.local_socket import new_local_address
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler
from tests.service.scheduler.test_faults import generate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")


async def test_a_worker_is_called_at_its_abstract_socket(scheduler: RunningScheduler) -> None:
    worker = FakeWorker()
    await worker.start(scheduler.address, local_address=new_local_address("worker"))
    await scheduler.until_ready()
    assert await generate(scheduler, "a", [5], 20) == list(range(6, 26))
    assert worker.callers == {"unix"}
    await worker.stop()


async def test_one_whose_socket_is_out_of_reach_is_called_over_tcp(scheduler: RunningScheduler) -> None:
    worker = FakeWorker()
    worker.local_address = new_local_address("worker") or ""  # no one listens there in this network namespace
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    assert await generate(scheduler, "a", [5], 20) == list(range(6, 26))
    assert worker.callers == {"ipv4"}
    await worker.stop()


async def test_a_successor_is_called_at_its_own_socket(scheduler: RunningScheduler) -> None:
    first = FakeWorker()
    await first.start(scheduler.address, local_address=new_local_address("worker"))
    await scheduler.until_ready()
    await first.stop()
    await scheduler.until(lambda: not scheduler.engine.is_ready)
    second = FakeWorker()
    await second.start(scheduler.address, local_address=new_local_address("worker"))
    await scheduler.until_ready()
    assert await generate(scheduler, "a", [5], 20) == list(range(6, 26))
    assert second.callers == {"unix"}
    await second.stop()


async def test_what_a_worker_tells_is_host_and_port(scheduler: RunningScheduler) -> None:
    worker = FakeWorker()
    await worker.start(scheduler.address, local_address=new_local_address("worker"))
    await scheduler.until_ready()
    state = await scheduler.stub.GetState(scheduler_pb2.GetStateRequest())
    (told,) = state.workers
    assert told.identity.address == worker.address
    assert told.identity.local_address == worker.local_address
    await worker.stop()
