"""Two workers at one scheduler: both serve, and a killed one costs its streams only a pause."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import grpc
import psutil
import pytest

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.process.children import free_port
from tests.process.failures.test_recovery import stream
from tests.process.stack import MODULES, Stack, poll_until, shown_token

NUM_STREAMS = 8


class TwoWorkers(Stack):
    """`pagoda serve` with two workers."""

    def __init__(self, flag: str = "--data-parallel-size=2") -> None:
        port = free_port()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._stub = scheduler_pb2_grpc.SchedulerStub(self.channel)
        self._port = port
        super().__init__(flag, f"--scheduler-port={port}")

    def state(self) -> scheduler_pb2.GetStateResponse:
        """What its scheduler tells."""
        shown = shown_token(self._port)
        return self._stub.GetState(scheduler_pb2.GetStateRequest(), timeout=240, metadata=shown)

    def serving_groups(self) -> list[int]:
        """Numbers of the groups that serve."""
        state = self.state()
        return sorted(worker.identity.group for worker in state.workers if worker.state == "serving")

    def states(self) -> list[str]:
        """What the groups are doing."""
        state = self.state()
        return sorted(worker.state for worker in state.workers)

    def wait_for_two(self) -> None:
        """Until both groups serve."""
        poll_until(lambda: len(self.serving_groups()) == 2, what="two groups serve", log=lambda: self.log)

    def workers(self) -> list[psutil.Process]:
        """The worker processes of now."""
        return [process for process in self.children() if MODULES["worker"] in process.cmdline()]

    def end(self) -> None:
        """Kill what is left of it."""
        self.channel.close()
        super().end()


@pytest.fixture
def stack() -> Iterator[TwoWorkers]:
    stack = TwoWorkers()
    try:
        stack.wait_ready()
        stack.wait_for_two()
        yield stack
    finally:
        stack.end()


def test_streams_of_a_killed_group_go_on_in_the_other_and_the_group_comes_back(stack: TwoWorkers) -> None:
    undisturbed = "".join(stream(stack, temperature=0.0))
    victim, other = stack.workers()
    under_way = [Event() for _ in range(NUM_STREAMS)]

    def read(number: int) -> str:
        text = ""
        for piece in stream(stack, temperature=0.0):
            text += piece
            if len(text) > 20:
                under_way[number].set()
        return text

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        texts = [threads.submit(read, number) for number in range(NUM_STREAMS)]
        assert all(event.wait(240) for event in under_way)
        victim.kill()
        assert [text.result() for text in texts] == [undisturbed] * NUM_STREAMS
    stack.wait_for_two()
    assert "sequences will be recomputed" in stack.log
    assert other in stack.workers()
    assert victim not in stack.workers()


def test_a_standby_worker_takes_the_streams_of_a_killed_one() -> None:
    stack = TwoWorkers("--standby-workers=1")
    try:
        stack.wait_ready()
        both = ["serving", "standby"]
        poll_until(lambda: stack.states() == both, what="one serves, one stands by", log=lambda: stack.log)
        undisturbed = "".join(stream(stack, temperature=1.0))
        state = stack.state()
        port = next(worker.identity.address for worker in state.workers if worker.state == "serving").rpartition(":")[2]
        victim = next(
            worker
            for worker in stack.workers()
            if any(connection.laddr.port == int(port) for connection in worker.net_connections())
        )
        text = ""
        for piece in stream(stack, temperature=1.0):
            if len(text) <= 40 < len(text) + len(piece):
                victim.kill()
            text += piece
        assert text == undisturbed
        poll_until(lambda: stack.states() == both, what="the killed one stands by", log=lambda: stack.log)
    finally:
        stack.end()
