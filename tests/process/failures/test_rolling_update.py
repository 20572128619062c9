"""Every service is ended by SIGTERM and replaced, one after the other, under streams: nothing is lost."""

import asyncio
import itertools
import random

import aiohttp

from tests.process.chaos.clients import LINE_BYTES, Progress, read
from tests.process.chaos.requests import ChaosRequest, make_requests
from tests.process.deployment import Deployment, deployment
from tests.process.transcript import Transcript, differences

NUM_STREAMS = 16
REFUSED = aiohttp.ClientConnectionError
"""Before an answer has begun: nothing of it was seen."""


async def stream(http: aiohttp.ClientSession, running: Deployment, request: ChaosRequest) -> Transcript:
    """One answer. As a load balancer does: a replica that refuses the request is passed over for the other."""
    for name in itertools.islice(itertools.cycle(random.sample(sorted(running.urls), 2)), 600):
        transcript = Transcript(times=[0.0])
        try:
            response = await http.post(f"{running.urls[name]}{request.path}", json=request.body)
        except REFUSED:
            await asyncio.sleep(0.05)
            continue
        async with response:
            if response.status == 503 and "shutting down" in await response.text():
                await asyncio.sleep(0.05)
                continue
            assert response.status == 200, await response.text()
            if request.kind == "embed":
                transcript.take_embeddings(0, await response.json())
                transcript.is_done = True
            else:
                await read(response, transcript, Progress())
        return transcript
    raise AssertionError("no replica takes a request")


async def test_every_service_is_replaced_under_streams_and_every_answer_is_whole() -> None:
    requests = make_requests(NUM_STREAMS, seed=3)
    async with (
        deployment() as running,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), read_bufsize=LINE_BYTES
        ) as http,
    ):
        expected = await asyncio.gather(*(stream(http, running, request) for request in requests))
        is_over = False
        num_answers = 0

        async def client(number: int) -> None:
            nonlocal num_answers
            while not is_over:
                got = await stream(http, running, requests[number])
                faults = [*got.own_faults(), *differences(expected[number], got)]
                assert faults == [], f"{requests[number]}\n{running.log}"
                num_answers += 1

        async def roll() -> None:
            nonlocal is_over
            for name in ("frontend-1", "worker", "scheduler"):
                await running.replace(name)
            is_over = True

        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(client(number))
            tasks.create_task(roll())
        assert num_answers >= NUM_STREAMS
        assert "Traceback" not in running.all_logs
        assert "sequences will be recomputed" in running.all_logs, "nothing had to be handed over"
