"""A forward pass that raises, or finds no memory, costs a pause: what it computed is computed again."""

import asyncio

import pytest
import torch

from pagoda.v1 import scheduler_pb2, types_pb2, worker_pb2_grpc
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.rpc.service import RpcServer
from pagoda_worker.rpc.registration import Registration
from pagoda_worker.rpc.servicer import WorkerServicer
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.steps.pending_step import PendingStep
from pagoda_worker.steps.step import StepInput
from pagoda_worker.worker import Worker
from tests.harness.scheduler import RunningScheduler, running_scheduler

FAILING_STEP = 12


async def generate(scheduler: RunningScheduler, name: str, seed: int) -> list[int]:
    params = types_pb2.SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True)
    request = scheduler_pb2.SubmitRequest(
        request_id=name, prompt_token_ids=token_ids_to_bytes([1, 40, 41, 42 + seed]), sampling_params=params
    )
    tokens: list[int] = []
    async for output in scheduler.stub.Generate(request):
        assert output.offset == len(tokens) or not output.token_ids
        tokens += output.token_ids
    return tokens


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), MemoryError(), RuntimeError("bug")])
async def test_requests_go_on_exactly_after_a_step_that_failed(
    monkeypatch: pytest.MonkeyPatch, error: Exception, overlaps: bool
) -> None:
    config = EngineConfig(
        model=ModelConfig(dtype="float32", device="cpu", max_model_len=128),
        cache=CacheConfig(num_blocks_override=64),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
    )
    worker, num_steps = Worker(num_threads=1, overlaps=overlaps), 0
    begin_soundly = ModelRunner.begin

    def begin(runner: ModelRunner, step: StepInput) -> PendingStep:
        nonlocal num_steps
        num_steps += 1
        if num_steps == fails_at:
            raise error
        return begin_soundly(runner, step)

    fails_at = 0
    monkeypatch.setattr(ModelRunner, "begin", begin)
    async with running_scheduler(config) as scheduler:
        server = RpcServer(services=("pagoda.v1.Worker",))
        servicer = WorkerServicer(worker=worker, set_serving=server.set_serving)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc_server)
        address = f"127.0.0.1:{await server.start(host='127.0.0.1', port=0)}"
        identity = scheduler_pb2.WorkerIdentity(
            address=address, world_size=1, incarnation=servicer.fence.incarnation, capabilities=["swap"]
        )
        registration = Registration(scheduler=scheduler.address, identity=identity, last_step=lambda: num_steps)
        registered = asyncio.create_task(registration.run())
        await scheduler.until_ready()
        undisturbed = [await generate(scheduler, f"alone-{seed}", seed) for seed in range(4)]
        num_steps, fails_at = 0, FAILING_STEP
        together = await asyncio.gather(*(generate(scheduler, f"together-{seed}", seed) for seed in range(4)))
        assert num_steps > fails_at
        assert together == undisturbed
        assert scheduler.engine.load().counters.num_worker_losses == 1
        registered.cancel()
        await server.stop(grace_s=0)
        await servicer.close()
