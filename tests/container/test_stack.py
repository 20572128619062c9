"""compose.yaml from `up` to `stop`, in this order: answers, scaling, `kill -9` under load, an end without a loss."""

import asyncio
import random
import re
from collections.abc import Callable

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.container.stack import ComposeStack
from tests.process.chaos.clients import Progress, stream_all
from tests.process.chaos.requests import ChaosRequest, make_requests
from tests.process.stack import ask, poll_until
from tests.process.transcript import Transcript, differences

REQUESTS = make_requests(32, seed=6)
NUM_LAST = 8
"""Of them, so many run when everything is stopped."""
TOKENS_BEFORE_FAULT = 10
"""On average in each stream, of a hundred and more."""
CALL_TIMEOUT_S = 120
READ_METRICS = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:8000/metrics').read().decode())"


async def streams(url: str, requests: list[ChaosRequest], fault: Callable[[], None] | None = None) -> list[Transcript]:
    """The answers to all requests at once; `fault` is called when they are in the middle of it."""
    progress = Progress()
    clients = asyncio.create_task(stream_all(url, requests, progress, draw=random.Random(6)))
    if fault is not None:
        is_under_way = asyncio.create_task(progress.reach(TOKENS_BEFORE_FAULT * len(requests)))
        await asyncio.wait({clients, is_under_way}, return_when=asyncio.FIRST_COMPLETED)
        assert not clients.done(), clients.result()[0]
        await asyncio.to_thread(fault)
    return await clients


def assert_equal(expected: list[Transcript], got: list[Transcript]) -> None:
    """Every stream came to its end, and says what it says undisturbed."""
    faults = [
        f"{request.kind}: {fault}"
        for request, one, other in zip(REQUESTS, expected, got, strict=False)
        for fault in (other.own_faults() or differences(one, other))
    ]
    assert not faults, "\n".join(faults)


def metric(stack: ComposeStack, container: str, name: str) -> float:
    """The sum of a metric of a frontend over its labels."""
    text = stack.execute(container, "python", "-c", READ_METRICS)
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def expected(stack: ComposeStack) -> list[Transcript]:
    """Undisturbed answers."""
    return asyncio.run(streams(stack.url, REQUESTS))


def test_a_chat_is_answered_through_the_balancer(stack: ComposeStack) -> None:
    assert len(ask(stack.url)) > 20


def test_a_stub_is_answered_through_the_balancer(stack: ComposeStack) -> None:
    sampling_params = types_pb2.SamplingParams(max_tokens=12, temperature=0)
    request = inference_pb2.GenerateRequest(text="Once upon a time", sampling_params=sampling_params)
    with grpc.insecure_channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        streamed = "".join(part.text for part in stub.Generate(request, timeout=CALL_TIMEOUT_S))
        assert streamed
        (whole,) = stub.GenerateUnary(request, timeout=CALL_TIMEOUT_S).outputs
    assert whole.text == streamed


def test_undisturbed_streams_are_whole(expected: list[Transcript]) -> None:
    assert_equal(expected, expected)


def test_two_workers_are_two_groups(stack: ComposeStack, expected: list[Transcript]) -> None:
    stack.up(worker=2)
    (frontend,) = stack.containers("frontend")
    poll_until(lambda: metric(stack, frontend, "pagoda:worker_groups") == 2, what="two groups serve")
    assert_equal(expected, asyncio.run(streams(stack.url, REQUESTS)))


def test_streams_outlive_a_worker(stack: ComposeStack, expected: list[Transcript]) -> None:
    (worker, _) = stack.containers("worker")
    got = asyncio.run(streams(stack.url, REQUESTS, lambda: stack.kill_process(worker)))
    assert_equal(expected, got)
    stack.wait_restarted(worker, times=1)


def test_streams_outlive_the_scheduler(stack: ComposeStack, expected: list[Transcript]) -> None:
    (scheduler,) = stack.containers("scheduler")
    got = asyncio.run(streams(stack.url, REQUESTS, lambda: stack.kill_process(scheduler)))
    assert_equal(expected, got)
    stack.wait_restarted(scheduler, times=1)


def test_the_balancer_spreads_requests_over_two_frontends(stack: ComposeStack) -> None:
    stack.up(worker=2, frontend=2)
    frontends = stack.containers("frontend")
    assert len(frontends) == 2

    def both_have_answered() -> bool:
        for _ in range(4):
            ask(stack.url)
        return all(metric(stack, frontend, "vllm:request_success_total") > 0 for frontend in frontends)

    poll_until(both_have_answered, what="both frontends have answered")


def test_a_stop_loses_no_open_stream(stack: ComposeStack, expected: list[Transcript]) -> None:
    containers = [one for name in ("balancer", "frontend", "scheduler", "worker") for one in stack.containers(name)]
    requests = REQUESTS[:NUM_LAST]
    got = asyncio.run(streams(stack.url, requests, lambda: stack.run("stop", timeout_s=300)))
    assert_equal(expected[:NUM_LAST], got)
    # 137 would be the engine's SIGKILL after stop_grace_period.
    assert [stack.inspect(container)["State"]["ExitCode"] for container in containers] == [0] * len(containers)
