"""A worker beside its scheduler is called at an abstract socket, over deaths of both; one with an address, over TCP."""

import signal
import sys
from collections.abc import Callable, Iterator

import grpc
import pytest

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.process.children import free_port
from pagoda_common.rpc.local_socket import has_listener, is_local_socket
from tests.process.stack import Process, poll_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")

HOST = "127.0.0.1"
NUM_TOKENS = 200


class Pair:
    """A scheduler and a worker, started by hand."""

    def __init__(self) -> None:
        self.scheduler = f"{HOST}:{free_port()}"
        self.channel = grpc.insecure_channel(self.scheduler)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self.channel)
        self.processes: dict[str, Process] = {}
        self._ended: list[Process] = []

    def start(self, name: str, *flags: str) -> None:
        """Start "scheduler" or "worker", in the place of one that has ended."""
        if name in self.processes:
            self._ended.append(self.processes[name])
        port = self.scheduler.rpartition(":")[2]
        argv = {"scheduler": [f"--port={port}"], "worker": [f"--scheduler={self.scheduler}", "--threads=1", *flags]}
        self.processes[name] = Process("-m", f"pagoda_{name}", *argv[name])

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.processes[name].signal(signal.SIGKILL)
        self.processes[name].wait()

    @property
    def log(self) -> str:
        """What both have printed, those before as well."""
        return "\n".join(process.log for process in [*self._ended, *self.processes.values()])

    def worker(self) -> scheduler_pb2.WorkerIdentity:
        """The one that serves, as it has told of itself."""

        def serving() -> scheduler_pb2.WorkerIdentity | None:
            try:
                state = self._stub.GetState(scheduler_pb2.GetStateRequest(), timeout=240)
            except grpc.RpcError:
                return None
            return next((worker.identity for worker in state.workers if worker.state == "serving"), None)

        identity = poll_until(serving, what="a worker serves", log=lambda: self.log)
        assert isinstance(identity, scheduler_pb2.WorkerIdentity)
        return identity

    def called_at(self) -> list[str]:
        """Abstract sockets at which workers of the scheduler of now were called, in order."""
        log = self.processes["scheduler"].log
        return [line.split()[-1] for line in log.splitlines() if "reaches the worker at" in line]

    def decode(self, at_token: Callable[[int], None] = lambda number: None) -> list[int]:
        """The tokens of a seeded stream."""
        params = types_pb2.SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
        request = scheduler_pb2.SubmitRequest(
            request_id="a", prompt_token_ids=token_ids_to_bytes([5, 6, 7]), sampling_params=params
        )
        tokens: list[int] = []
        for output in self._stub.Generate(request, timeout=180):
            assert output.offset == len(tokens) or not output.token_ids
            tokens += output.token_ids
            at_token(len(tokens))
        return tokens

    def end(self) -> None:
        """Kill what is left."""
        self.channel.close()
        for process in [*self._ended, *self.processes.values()]:
            process.end()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    try:
        yield pair
    finally:
        pair.end()


def test_a_worker_beside_its_scheduler_is_called_at_an_abstract_socket(pair: Pair) -> None:
    pair.start("scheduler")
    pair.start("worker")
    identity = pair.worker()
    assert is_local_socket(identity.local_address)
    assert has_listener(identity.local_address)
    assert pair.called_at() == [identity.local_address]
    tokens = pair.decode()
    assert len(tokens) == NUM_TOKENS

    is_killed = False

    def kill_worker(number: int) -> None:
        nonlocal is_killed
        if number > 20 and not is_killed:
            is_killed = True
            pair.kill("worker")
            pair.start("worker")

    assert pair.decode(kill_worker) == tokens, "a stream goes on at the successor's socket"
    assert is_killed
    successor = pair.worker()
    assert successor.local_address != identity.local_address
    assert not has_listener(identity.local_address), "it went with its process"
    assert pair.called_at() == [identity.local_address, successor.local_address]

    pair.kill("scheduler")
    pair.start("scheduler")
    assert pair.worker().local_address == successor.local_address
    assert pair.called_at() == [successor.local_address]
    assert pair.decode() == tokens


def test_a_worker_that_was_frozen_comes_back_to_its_socket(pair: Pair) -> None:
    pair.start("scheduler")
    pair.start("worker")
    identity = pair.worker()
    tokens = pair.decode()
    pid = pair.processes["worker"]
    is_frozen = False

    def freeze(number: int) -> None:
        nonlocal is_frozen
        if number > 20 and not is_frozen:
            is_frozen = True
            pid.signal(signal.SIGSTOP)
            poll_until(lambda: "is gone" in pair.log, what="it is given up", log=lambda: pair.log)
            pid.signal(signal.SIGCONT)

    assert pair.decode(freeze) == tokens
    assert is_frozen
    assert pair.worker().local_address == identity.local_address
    assert pair.decode() == tokens


def test_a_worker_with_an_address_is_called_there(pair: Pair) -> None:
    port = free_port()
    pair.start("scheduler")
    pair.start("worker", f"--port={port}", f"--advertise-address={HOST}:{port}")
    identity = pair.worker()
    assert (identity.address, identity.local_address) == (f"{HOST}:{port}", "")
    assert len(pair.decode()) == NUM_TOKENS
    assert pair.called_at() == []
