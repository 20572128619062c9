"""EngineControl: operators' calls to a scheduler, for frontends and Python programs."""

from collections.abc import Sequence

import grpc.aio

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.engine.convert import lora_adapter_from_proto, lora_adapter_to_proto
from pagoda_common.errors import InvalidRequest, NotFound, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.rpc.service import error_from_rpc

STATE_TIMEOUT_S = 10.0
LORA_TIMEOUT_S = 600.0
"""An adapter may come from a hub."""
MOVE_TIMEOUT_S = 3600.0
"""Weights may come from a disk far away; a worker that hangs is noticed earlier by other means."""
SLEEP_MODES = {"keep": scheduler_pb2.SLEEP_MODE_KEEP, "abort": scheduler_pb2.SLEEP_MODE_ABORT}


class EngineControl:
    """Sleep, wake-up and new weights. Every call raises PagodaError with the scheduler's reason."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """`channel`: to the scheduler; the caller closes it."""
        self._stub = scheduler_pb2_grpc.SchedulerStub(channel)

    async def sleep(
        self, *, level: int = 1, mode: str = "keep", group: int | None = None
    ) -> scheduler_pb2.SleepResponse:
        """Let the engine give its memory away; returns when it has.

        Args:
            level: 1 keeps the weights in host memory where the device has its own, 2 drops them.
            mode: keep lets open requests continue later, abort ends them.
            group: of one worker group; None is all.
        """
        if level not in (1, 2):
            raise InvalidRequest(f"level is {level}, must be 1 or 2", field="level")
        if mode not in SLEEP_MODES:
            raise InvalidRequest(f"mode is {mode!r}, must be one of {', '.join(SLEEP_MODES)}", field="mode")
        request = scheduler_pb2.SleepRequest(level=level, mode=SLEEP_MODES[mode], group=group)
        try:
            return await self._stub.Sleep(request, timeout=MOVE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def wake_up(self, *, tags: Sequence[str] = (), group: int | None = None) -> scheduler_pb2.WakeUpResponse:
        """Let the engine serve again; returns when it does. With the tag weights alone it has them and sleeps on."""
        request = scheduler_pb2.WakeUpRequest(tags=tags, group=group)
        try:
            return await self._stub.WakeUp(request, timeout=MOVE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def is_sleeping(self) -> bool:
        """Whether no group serves because some sleep."""
        try:
            state = await self._stub.IsSleeping(scheduler_pb2.IsSleepingRequest(), timeout=STATE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return state.is_sleeping

    async def reload_weights(
        self, model: str, *, revision: str | None = None, group: int | None = None
    ) -> scheduler_pb2.ReloadWeightsResponse:
        """Serve other weights of the same architecture; returns when every group does. Open requests use them.

        Args:
            model: directory or hub id, as the workers reach it.
            group: of one worker group; None is all.
        """
        request = scheduler_pb2.ReloadWeightsRequest(model=model, revision=revision or "", group=group)
        try:
            return await self._stub.ReloadWeights(request, timeout=MOVE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def add_lora(self, adapter: LoraAdapter, *, load_inplace: bool = False) -> LoraAdapter:
        """Serve an adapter; as it is listed then. With an empty path the scheduler looks for it by its name.

        Args:
            load_inplace: take the place of the weights that the name has.

        Raises:
            NotFound: it was looked for, and there is none of that name.
            PagodaError: it cannot be read, or the name has weights already.
        """
        request = scheduler_pb2.AddLoraRequest(adapter=lora_adapter_to_proto(adapter), load_inplace=load_inplace)
        try:
            answer = await self._stub.AddLora(request, timeout=LORA_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _lora_error(error) from error
        return lora_adapter_from_proto(answer.adapter)

    async def remove_lora(self, name: str) -> None:
        """Take no more requests for an adapter; raises NotFound when there is none of that name."""
        try:
            await self._stub.RemoveLora(scheduler_pb2.RemoveLoraRequest(name=name), timeout=STATE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _lora_error(error) from error

    async def pin_lora(self, name: str, *, is_pinned: bool = True) -> None:
        """Keep an adapter in the workers' memory, or not; raises NotFound when there is none of that name."""
        request = scheduler_pb2.PinLoraRequest(name=name, is_pinned=is_pinned)
        try:
            await self._stub.PinLora(request, timeout=STATE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _lora_error(error) from error

    async def list_loras(self) -> list[LoraAdapter]:
        """The adapters that requests may name, in order of name."""
        try:
            answer = await self._stub.ListLoras(scheduler_pb2.ListLorasRequest(), timeout=STATE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return [lora_adapter_from_proto(adapter) for adapter in answer.adapters]


def _lora_error(error: grpc.aio.AioRpcError) -> PagodaError:
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return NotFound(str(error.details()), field="lora_name")
    return error_from_rpc(error)
