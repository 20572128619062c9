"""The part of FakeScheduler that sleeps, wakes up and takes other weights."""

from typing import Any

import grpc

from pagoda.v1 import scheduler_pb2, types_pb2


class FakeSleep:
    """Keeps what it was asked for; a model called "missing" does not exist."""

    load: types_pb2.EngineLoad
    is_paused: bool

    def __init__(self) -> None:
        self.sleeps: list[scheduler_pb2.SleepRequest] = []
        self.wakes: list[scheduler_pb2.WakeUpRequest] = []
        self.reloads: list[scheduler_pb2.ReloadWeightsRequest] = []

    def set_ready(self, is_ready: bool, reason: str = "") -> None:
        """Change the load and tell every session."""
        raise NotImplementedError

    async def Sleep(self, request: scheduler_pb2.SleepRequest, context: Any) -> scheduler_pb2.SleepResponse:
        self.sleeps.append(request)
        self.is_paused, self.load.sleep_level = True, request.level
        self.set_ready(False, f"the model sleeps (level {request.level})")
        return scheduler_pb2.SleepResponse(num_groups=1)

    async def WakeUp(self, request: scheduler_pb2.WakeUpRequest, context: Any) -> scheduler_pb2.WakeUpResponse:
        self.wakes.append(request)
        if list(request.tags) != ["weights"]:
            self.is_paused, self.load.sleep_level = False, 0
            self.set_ready(True)
        return scheduler_pb2.WakeUpResponse(num_groups=1)

    async def IsSleeping(
        self, request: scheduler_pb2.IsSleepingRequest, context: Any
    ) -> scheduler_pb2.IsSleepingResponse:
        return scheduler_pb2.IsSleepingResponse(is_sleeping=self.load.sleep_level > 0, level=self.load.sleep_level)

    async def ReloadWeights(
        self, request: scheduler_pb2.ReloadWeightsRequest, context: Any
    ) -> scheduler_pb2.ReloadWeightsResponse:
        self.reloads.append(request)
        if request.model == "missing":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "model 'missing' is not a directory")
        return scheduler_pb2.ReloadWeightsResponse(num_groups=1, seconds=0.5, pause_s=0.25)
