"""A real worker in a real server in this process, and a scheduler's side to call it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
import numpy as np
import pytest
import torch

from pagoda.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from pagoda_common.rpc.service import RpcServer, connect
from pagoda_worker.rpc.servicer import WorkerServicer
from pagoda_worker.worker import Worker

SERVICE = "pagoda.v1.Worker"
PROMPT = (1, 40, 41, 42, 43)


def worker_config(**changes: Any) -> worker_pb2.WorkerConfig:
    """The embedded model in few slots."""
    values: dict[str, Any] = {
        "model": "pagoda-tiny",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 0.9,
        "load_format": "auto",
        "max_logprobs": 20,
        "cpu_kv_cache_memory_bytes": 1 << 20,
    }
    return worker_pb2.WorkerConfig(**(values | changes))


def new_request(slot: int = 0, prompt: Sequence[int] = PROMPT, **params: Any) -> worker_pb2.NewRequest:
    """A greedy sequence with four blocks of its own."""
    return worker_pb2.NewRequest(
        slot=slot,
        request_id=f"r{slot}",
        prompt_token_ids=np.array(prompt, dtype="<u4").tobytes(),
        sampling_params=types_pb2.SamplingParams(**({"temperature": 0.0} | params)),
        block_ids=np.arange(4 * slot, 4 * slot + 4, dtype="<u4").tobytes(),
    )


class Caller:
    """A scheduler of one epoch: fills in epoch, incarnation and step."""

    def __init__(self, channel: grpc.aio.Channel, epoch: int = 1) -> None:
        self.stub = worker_pb2_grpc.WorkerStub(channel)
        self.epoch = epoch
        self.incarnation = 0
        self.step = 0
        self.options: dict[str, Any] = {}
        """Of every InitDevice."""

    async def init_device(self, **changes: Any) -> worker_pb2.InitDeviceResponse:
        config = worker_config(**self.options | changes)
        request = worker_pb2.InitDeviceRequest(session_epoch=self.epoch, config=config)
        response = await self.stub.InitDevice(request, timeout=240)
        self.incarnation = response.worker_incarnation
        return response

    async def load_model(self) -> list[worker_pb2.LoadModelProgress]:
        request = worker_pb2.LoadModelRequest(session_epoch=self.epoch)
        return [message async for message in self.stub.LoadModel(request, timeout=240)]

    async def determine(self) -> worker_pb2.DetermineNumAvailableBlocksResponse:
        request = worker_pb2.DetermineNumAvailableBlocksRequest(session_epoch=self.epoch)
        return await self.stub.DetermineNumAvailableBlocks(request, timeout=240)

    async def initialize_cache(self, num_blocks: int = 40, num_cpu_blocks: int = 4) -> int:
        self.step = 0
        request = worker_pb2.InitializeCacheRequest(
            session_epoch=self.epoch, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks
        )
        response = await self.stub.InitializeCache(request, timeout=240)
        return int(response.swap_block_ns)

    async def bring_up(self, **changes: Any) -> None:
        await self.init_device(**changes)
        await self.load_model()
        await self.determine()
        await self.initialize_cache()

    def request(self, slots: Sequence[int] = (), counts: Sequence[int] = (), **fields: Any) -> Any:
        """The next step; without slots the batch of the one before."""
        self.step += 1
        values: dict[str, Any] = {
            "session_epoch": self.epoch,
            "worker_incarnation": self.incarnation,
            "step": self.step,
            "num_seqs": len(slots),
            "slots": np.array(slots, dtype="<u2").tobytes(),
            "num_scheduled_tokens": np.array(counts, dtype="<u4").tobytes(),
        }
        return worker_pb2.ExecuteModelRequest(**(values | fields))

    def prefill(self, *requests: worker_pb2.NewRequest) -> Any:
        """A step that starts `requests` and computes their prompts whole."""
        counts = [len(request.prompt_token_ids) // 4 for request in requests]
        return self.request([request.slot for request in requests], counts, new_requests=requests)

    async def execute(self, request: Any) -> Any:
        return await self.stub.ExecuteModel(request, timeout=240)

    async def status(self) -> Any:
        return await self.stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=240)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 (conditions are of any kind)
            await asyncio.sleep(0.01)


def tokens_of(output: Any) -> list[int]:
    """Sampled tokens of a step."""
    ids: list[int] = np.frombuffer(output.token_ids, dtype="<u4").tolist()
    return ids


class Served:
    """The server's side."""

    def __init__(self, *, overlaps: bool) -> None:
        self.worker = Worker(num_threads=1, overlaps=overlaps)
        self.server = RpcServer(services=(SERVICE,))
        self.servicer = WorkerServicer(worker=self.worker, set_serving=self.server.set_serving)
        self.address = ""


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """The parameter, if there is one: whether its worker launches steps ahead."""
    torch.set_num_threads(1)
    side = Served(overlaps=getattr(request, "param", False))
    worker_pb2_grpc.add_WorkerServicer_to_server(side.servicer, side.server.grpc_server)
    side.address = f"127.0.0.1:{await side.server.start(host='127.0.0.1', port=0)}"
    yield side
    await side.server.stop(grace_s=0)
    await side.servicer.close()


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(served.address) as open_channel:
        yield open_channel


@pytest.fixture
async def caller(channel: grpc.aio.Channel) -> Caller:
    """A scheduler whose worker serves."""
    made = Caller(channel)
    await made.bring_up()
    return made
