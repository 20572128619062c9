"""Asks a scheduler why its engine is not ready. Notices that a worker cannot load the model, which no restart mends."""

import asyncio

import grpc.aio

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.rpc.channels import connect

POLL_S = 0.25
RPC_TIMEOUT_S = 5.0


async def find_load_fault(scheduler: str, *, security: SecurityConfig) -> str:
    """Why the worker of the scheduler at host:port has not loaded the model; waits forever while nothing is wrong.

    Loading begins with the registration. A worker that is registered, and no more, in two polls has failed to load and
    waits for the next attempt.
    """
    async with connect(scheduler, security=security) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        num_idle = 0
        while True:
            await asyncio.sleep(POLL_S)
            try:
                state = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=RPC_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                continue
            is_idle = any(worker.state == "registered" for worker in state.workers)
            num_idle = num_idle + 1 if is_idle and not state.load.is_ready else 0
            if num_idle == 2:
                return state.load.not_ready_reason


async def not_ready_reason(scheduler: str, *, security: SecurityConfig) -> str | None:
    """Why the engine of the scheduler at host:port is not ready: None when it is, empty when no one answers."""
    async with connect(scheduler, security=security) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        try:
            state = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return ""
    return None if state.load.is_ready else state.load.not_ready_reason
