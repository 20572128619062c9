"""Ten thousand requests at once, half of them aborted, a quarter with a deadline: nothing hangs, nothing stays."""

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.engine.client import EngineClient, EngineRequest, EngineStream
from pagoda_common.errors import Code
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.process.children import free_port, spawn_service, stop_process
from pagoda_common.rpc.service import connect
from tests.fakes.fake_worker import FakeWorker

NUM_REQUESTS = 10_000
ROUND_TIMEOUT_S = 240
MAX_GROWTH = 1.05
GIVES_BACK_S = 20
"""Longest time of rest after which the scheduler still gives memory back (pagoda_common.process.idle_memory)."""
FLAGS = ("--max-num-seqs=256", "--max-num-batched-tokens=8192")


@asynccontextmanager
async def scheduler_process() -> AsyncIterator[
    tuple[psutil.Process, EngineClient, "scheduler_pb2_grpc.SchedulerAsyncStub"]
]:
    """A scheduler as a child process, a fake worker, and a session."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    child = spawn_service("pagoda_scheduler", ["--port", str(port), *FLAGS], env={"PAGODA_LOG_LEVEL": "error"})
    worker = FakeWorker(num_blocks=4000)
    client = EngineClient(address=address)
    try:
        async with connect(address) as channel:
            await worker.start(address)
            await client.start()
            await client.wait_until_ready(240)
            yield psutil.Process(child.pid), client, scheduler_pb2_grpc.SchedulerStub(channel)
    finally:
        await client.close()
        await worker.stop()
        await asyncio.to_thread(stop_process, child, timeout_s=60)


async def outcome(stream: EngineStream) -> str:
    """Read a stream to its end; how it ended."""
    while not stream.is_finished:
        for output in await stream.get():
            if output.error is not None and output.error.code is Code.DEADLINE_EXCEEDED:
                return "deadline"
            if output.finish_reason is not None:
                return output.finish_reason
    return "abort"


async def abuse(client: EngineClient, seed: int) -> dict[str, int]:
    """One round; how many requests ended in which way."""
    generator = random.Random(seed)
    streams = []
    for number in range(NUM_REQUESTS):
        prompt = [generator.randrange(100_000) for _ in range(generator.randrange(1, 100))]
        params = SamplingParams(temperature=0.0, max_tokens=generator.randrange(1, 30), ignore_eos=True)
        timeout_s = generator.uniform(0.01, 2.0) if generator.random() < 0.25 else 0.0
        streams.append(
            client.submit(
                EngineRequest(
                    request_id=f"{seed}-{number}", prompt_token_ids=prompt, sampling_params=params, timeout_s=timeout_s
                )
            )
        )
    ends = [asyncio.create_task(outcome(stream)) for stream in streams]
    for stream in generator.sample(streams, NUM_REQUESTS // 2):
        if generator.random() < 0.01:
            await asyncio.sleep(0.005)  # some while they wait, some while they run
        stream.abort()
    counts: dict[str, int] = {}
    async with asyncio.timeout(ROUND_TIMEOUT_S):
        for reason in await asyncio.gather(*ends):
            counts[reason] = counts.get(reason, 0) + 1
    return counts


async def settled(client: EngineClient, stub: "scheduler_pb2_grpc.SchedulerAsyncStub") -> None:
    """Wait until the scheduler holds nothing."""
    async with asyncio.timeout(240):
        while True:
            state = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=240)
            if not state.sequences and state.load.num_used_blocks == 0 and client.num_open_requests == 0:
                break
            await asyncio.sleep(0.05)
    assert (state.load.num_running_reqs, state.load.num_waiting_reqs) == (0, 0)


async def size_at_rest(process: psutil.Process, bound: float = 0.0) -> int:
    """Resident bytes when they have not changed for two seconds: after a burst the scheduler gives memory back, a few
    times. With a `bound` it waits longer, for as long as the scheduler may still give something."""
    sizes: list[int] = []
    started = time.monotonic()
    async with asyncio.timeout(240):
        while (
            len(sizes) < 10
            or len(set(sizes[-10:])) > 1
            or (sizes[-1] > bound > 0 and time.monotonic() - started < GIVES_BACK_S)
        ):
            await asyncio.sleep(0.2)
            sizes.append(process.memory_info().rss)
    return sizes[-1]


async def test_ten_thousand_queued_requests_leave_nothing_behind() -> None:
    sizes: list[int] = []
    async with scheduler_process() as (process, client, stub):
        for seed in range(3):
            started = time.monotonic()
            counts = await abuse(client, seed)
            assert sum(counts.values()) == NUM_REQUESTS
            assert counts["abort"] > NUM_REQUESTS // 4, counts
            assert counts["length"] > NUM_REQUESTS // 4, counts
            assert counts["deadline"] > 0, counts
            assert set(counts) == {"abort", "length", "deadline"}, counts
            await settled(client, stub)
            gc.collect()
            bound = MAX_GROWTH * sizes[0] if sizes else 0.0
            sizes.append(await size_at_rest(process, bound))
            print(seed, counts, f"{time.monotonic() - started:.1f} s, RSS {sizes[-1] / 1e6:.1f} MB")
    assert max(sizes[1:]) <= MAX_GROWTH * sizes[0], f"memory did not return to within 5 %: {sizes} bytes"
