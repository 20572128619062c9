"""A whole engine in this process over real sockets: scheduler, worker and engine client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pagoda.v1 import scheduler_pb2, worker_pb2_grpc
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.params.outputs import EngineOutput
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.rpc.service import RpcServer
from pagoda_worker.rpc.registration import CAPABILITIES, Registration
from pagoda_worker.rpc.servicer import WorkerServicer
from pagoda_worker.worker import Worker
from tests.harness.scheduler import RunningScheduler, running_scheduler


@dataclass
class RunningEngine:
    """An engine that serves."""

    client: EngineClient
    scheduler: RunningScheduler

    async def generate(self, name: str, prompt: list[int], params: SamplingParams) -> list[EngineOutput]:
        """Every output of one request, checked for gaps."""
        stream = self.client.submit(
            EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, eos_token_ids=())
        )
        outputs: list[EngineOutput] = []
        counts = [0] * params.n
        while not stream.is_finished:
            for output in await stream.get():
                if output.token_ids:
                    assert output.offset == counts[output.index]
                    counts[output.index] += len(output.token_ids)
                outputs.append(output)
        return outputs

    async def tokens(self, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
        """Output tokens of a request with one sequence."""
        return [token for output in await self.generate(name, prompt, params) for token in output.token_ids]

    async def all_tokens(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """Output tokens of many requests at once."""
        return await asyncio.gather(*(self.tokens(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)))


@asynccontextmanager
async def running_engine(config: EngineConfig, *, overlaps: bool = False) -> AsyncIterator[RunningEngine]:
    """A scheduler, one worker and a client, all in this process. `overlaps`: its steps do, as on a GPU."""
    async with running_scheduler(config) as scheduler, running_worker(scheduler.address, overlaps=overlaps):
        client = EngineClient(address=scheduler.address)
        await client.start()
        await client.wait_until_ready(240)
        try:
            yield RunningEngine(client, scheduler)
        finally:
            await client.close()


@asynccontextmanager
async def running_worker(scheduler_address: str, *, overlaps: bool = False) -> AsyncIterator[WorkerServicer]:
    """A real worker on a free port, registered with a scheduler."""
    server = RpcServer(services=("pagoda.v1.Worker",))
    servicer = WorkerServicer(worker=Worker(num_threads=1, overlaps=overlaps), set_serving=server.set_serving)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc_server)
    port = await server.start(host="127.0.0.1", port=0)
    identity = scheduler_pb2.WorkerIdentity(
        address=f"127.0.0.1:{port}",
        rank=0,
        world_size=1,
        device="cpu",
        incarnation=servicer.fence.incarnation,
        capabilities=CAPABILITIES,
    )
    registration = Registration(scheduler=scheduler_address, identity=identity, last_step=lambda: servicer.last_step)
    registered = asyncio.create_task(registration.run())
    try:
        yield servicer
    finally:
        registered.cancel()
        await asyncio.wait([registered])
        await server.stop(grace_s=0)
        await servicer.close()
