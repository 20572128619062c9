"""A worker, a frontend and a scheduler of the previous version beside today's: requests finish."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.rpc.service import connect
from tests.compat.contracts import Contracts
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import running_scheduler

OLD = Contracts()
CONFIG = EngineConfig(
    cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
)
NUM_TOKENS = 30


class OldWorker:
    """A worker of the previous version whose next token is the last one plus one."""

    def __init__(self) -> None:
        self.incarnation = secrets.randbits(63) | 1
        self._last = np.zeros(8, dtype="<u4")
        self._left = np.zeros(8, dtype=np.int64)
        """Tokens of each slot that have not been computed."""
        self._slots = np.zeros(0, dtype="<u2")

    async def serve(self, scheduler: str) -> None:
        """Listen and stay registered, until cancelled."""
        server = grpc.aio.server()
        behaviours = {
            "InitDevice": self.init_device,
            "LoadModel": self.load_model,
            "DetermineNumAvailableBlocks": self.determine,
            "InitializeCache": self.initialize,
            "Execute": self.execute,
        }
        server.add_generic_rpc_handlers((OLD.handlers("Worker", behaviours),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

        async def messages() -> AsyncIterator[Any]:
            address = f"127.0.0.1:{port}"
            identity = OLD.WorkerIdentity(address=address, world_size=1, device="old", incarnation=self.incarnation)
            yield OLD.WorkerRegistration(identity=identity)
            while True:
                await asyncio.sleep(1)
                yield OLD.WorkerRegistration(heartbeat=OLD.WorkerHeartbeat())

        try:
            async with connect(scheduler) as channel:
                async for _ in OLD.stub(channel, "Scheduler", "RegisterWorker")(messages()):
                    pass
        finally:
            await server.stop(0)

    async def init_device(self, request: Any, context: Any) -> Any:
        return OLD.InitDeviceResponse(worker_incarnation=self.incarnation, device="old")

    async def load_model(self, request: Any, context: Any) -> AsyncIterator[Any]:
        info = OLD.ModelInfo(model="old", architecture="Old", vocab_size=1_000_000, max_model_len=4096)
        yield OLD.LoadModelProgress(loaded_bytes=1, total_bytes=1, model_info=info)

    async def determine(self, request: Any, context: Any) -> Any:
        return OLD.DetermineNumAvailableBlocksResponse(num_blocks=1000, block_bytes=1)

    async def initialize(self, request: Any, context: Any) -> Any:
        return OLD.InitializeCacheResponse()

    async def execute(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            for new in request.new_requests:
                log = np.frombuffer(new.prompt_token_ids + new.output_token_ids, dtype="<u4")
                self._last[new.slot], self._left[new.slot] = log[-1], len(log) - new.num_computed_tokens
            if request.slots:
                self._slots = np.frombuffer(request.slots, dtype="<u2")
            counts = [1] * request.num_seqs
            if request.num_scheduled_tokens:
                counts = np.frombuffer(request.num_scheduled_tokens, dtype="<u4").tolist()
            sampled = []
            for slot, count in zip(self._slots.tolist(), counts, strict=True):
                self._left[slot] -= count
                if self._left[slot] == 0:
                    self._last[slot] += 1
                    self._left[slot] = 1
                    sampled.append(slot)
            yield OLD.SamplerOutput(
                session_epoch=request.session_epoch,
                worker_incarnation=request.worker_incarnation,
                step=request.step,
                num_sampled_tokens=bytes(int(slot in sampled) for slot in self._slots.tolist()),
                token_ids=self._last[sampled].tobytes(),
            )


async def output_of(client: EngineClient, name: str, prompt: list[int]) -> list[int]:
    """The tokens of one request."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    stream = client.submit(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params))
    tokens: list[int] = []
    while not stream.is_finished:
        for output in await stream.get():
            assert output.offset == len(tokens) or not output.token_ids
            tokens += output.token_ids
    return tokens


async def test_an_old_worker_computes_for_todays_scheduler() -> None:
    async with running_scheduler(CONFIG) as scheduler:
        worker = asyncio.create_task(OldWorker().serve(scheduler.address))
        client = EngineClient(address=scheduler.address)
        await client.start()
        try:
            async with asyncio.timeout(240):
                await client.wait_until_ready()
                outputs = await asyncio.gather(*(output_of(client, str(i), [100 * i] * 70) for i in range(1, 7)))
            assert outputs == [list(range(100 * i + 1, 100 * i + 1 + NUM_TOKENS)) for i in range(1, 7)]
        finally:
            await client.close()
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


async def test_an_old_frontend_is_served_by_todays_scheduler() -> None:
    async with running_scheduler(CONFIG) as scheduler, connect(scheduler.address) as channel:
        worker = FakeWorker()
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        call = OLD.stub(channel, "Scheduler", "Session")()
        hello = OLD.FrontendHello(frontend_id="old", version="0.1.0")
        params = OLD.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1, n=2)
        submit = OLD.SubmitRequest(
            request_id="a",
            attempt=1,
            slots=[3, 5],
            prompt_token_ids=token_ids_to_bytes([100]),
            sampling_params=params,
        )
        async with asyncio.timeout(240):
            await call.write(OLD.FrontendMessage(hello=hello))
            assert (await call.read()).HasField("hello")
            batch = OLD.FrontendBatch(messages=[OLD.FrontendMessage(submit=submit)])
            await call.write(OLD.FrontendMessage(batch=batch))
            outputs: dict[int, list[int]] = {3: [], 5: []}
            num_finished = 0
            while num_finished < 2:
                message = await call.read()
                assert not message.rejected
                columns = (np.frombuffer(part, "<u4").tolist() for part in (message.slots, message.offsets))
                tokens = np.frombuffer(message.token_ids, "<u4").tolist()
                for slot, offset, token in zip(*columns, tokens, strict=True):
                    assert offset == len(outputs[slot])
                    outputs[slot].append(token)
                for finished in message.finished:
                    assert finished.num_output_tokens == len(outputs[finished.slot]) == NUM_TOKENS
                    num_finished += 1
        assert outputs == {slot: list(range(101, 101 + NUM_TOKENS)) for slot in (3, 5)}
        call.cancel()
        await worker.stop()


class OldScheduler:
    """A scheduler of the previous version with one step a message; its first session breaks in the middle."""

    def __init__(self) -> None:
        self.num_sessions = 0
        self.num_resumed = 0
        self.num_unknown = 0
        """Messages without a content that it knows."""

    async def session(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.num_sessions += 1
        epoch, is_breaking = self.num_sessions, self.num_sessions == 1
        load = OLD.EngineLoad(is_ready=True, num_groups=1, num_total_blocks=10, block_size=16)
        info = OLD.ModelInfo(model="old", architecture="Old", vocab_size=1000, max_model_len=512)
        hello = OLD.SchedulerHello(version="0.1.0")
        yield OLD.SchedulerMessage(session_epoch=epoch, hello=hello, load=load, model_info=info)
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, arrived))
        try:
            submit = await arrived.get()
            first = np.frombuffer(submit.prompt_token_ids, "<u4")[-1] + 1
            start = 0
            if submit.HasField("resume"):
                self.num_resumed += 1
                start = len(submit.resume.sequences[0].output_token_ids) // 4
            for offset in range(start, submit.sampling_params.max_tokens):
                if is_breaking and offset == 10:
                    return
                message = OLD.SchedulerMessage(session_epoch=epoch, step=offset + 1, load=load)
                message.slots = token_ids_to_bytes([submit.slots[0]])
                message.offsets = token_ids_to_bytes([offset])
                message.token_ids = token_ids_to_bytes([int(first) + offset])
                if offset + 1 == submit.sampling_params.max_tokens:
                    message.finished.add(slot=submit.slots[0], finish_reason=2, num_output_tokens=offset + 1)
                yield message
            await asyncio.Event().wait()
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[Any], arrived: "asyncio.Queue[Any]") -> None:
        async for request in requests:
            for message in request.batch.messages or [request]:
                kind = message.WhichOneof("message")
                self.num_unknown += kind is None
                if kind == "submit":
                    arrived.put_nowait(message.submit)


async def test_todays_frontend_is_served_by_an_old_scheduler_and_survives_its_break() -> None:
    fake = OldScheduler()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((OLD.handlers("Scheduler", {"Session": fake.session}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = EngineClient(address=f"127.0.0.1:{port}")
    await client.start()
    try:
        async with asyncio.timeout(240):
            await client.wait_until_ready()
            assert await output_of(client, "a", [7]) == list(range(8, 8 + NUM_TOKENS))
        assert (fake.num_sessions, fake.num_resumed, fake.num_unknown) == (2, 1, 0)
    finally:
        await client.close()
        await server.stop(0)
