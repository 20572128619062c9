"""Operators' calls for the engine's memory: sleep, wake up, reload weights. Served with --enable-sleep-mode."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from fastapi import Request, Response

from pagoda_common.engine.client import EngineClient
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_frontend.http.body import json_response, read_body
from pagoda_frontend.http.browsers import refuse_forms
from pagoda_frontend.openai.protocol import ReloadWeightsBody
from pagoda_frontend.serving.serving import Serving

NEWS_TIMEOUT_S = 2.0
"""Seconds that an answer waits until this frontend's view of the engine agrees with it."""
NEWS_POLL_S = 0.01


class SleepMode:
    """vLLM's endpoints of the same names, and /reload_weights. They answer when the engine has finished."""

    def __init__(self, *, serving: Serving, engine: EngineClient) -> None:
        self._serving = serving
        self._engine = engine

    async def sleep(self, request: Request) -> Response:
        """Free the memory of the KV cache and, depending on the level, of the weights."""
        refuse_forms(request.headers)
        level = _number(request, "level")
        await self._engine.control.sleep(
            level=1 if level is None else level,
            mode=request.query_params.get("mode", "keep"),
            group=_number(request, "group"),
        )
        await self._hear()
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        """Restore the memory and serve the requests that waited."""
        refuse_forms(request.headers)
        tags = request.query_params.getlist("tags")
        await self._engine.control.wake_up(tags=tags, group=_number(request, "group"))
        await self._hear()
        return Response(status_code=200)

    async def _hear(self) -> None:
        """Wait until /ready and /metrics show the engine's new state, which arrives over the session."""
        is_sleeping = await self._engine.control.is_sleeping()
        for _ in range(round(NEWS_TIMEOUT_S / NEWS_POLL_S)):
            if self._engine.is_sleeping == is_sleeping:
                return
            await asyncio.sleep(NEWS_POLL_S)

    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine sleeps. Requests wait while it does."""
        return json_response({"is_sleeping": await self._engine.control.is_sleeping()})

    async def reload_weights(self, request: Request) -> Response:
        """Load other weights of the same architecture. Running requests continue with them."""
        body = await read_body(request, ReloadWeightsBody, serving=self._serving)
        config = self._serving.config
        model = allowed_weights(body.model, allowed=(config.model, *config.allowed_weights))
        done = await self._engine.control.reload_weights(model, revision=body.revision, group=body.group)
        return json_response({"num_groups": done.num_groups, "seconds": done.seconds, "pause_s": done.pause_s})


def allowed_weights(model: str, *, allowed: Sequence[str], field: str = "model") -> str:
    """`model`, a directory or hub id, if weights may come from it. Only its name is checked, so that no files are
    revealed.

    Args:
        allowed: hub ids, directories with all below them, or `*`, which is any.

    Raises:
        PagodaError: weights may not come from it.
    """
    if model in allowed or "*" in allowed:
        return model
    whole = os.path.normpath(model) if os.path.isabs(model) else ""
    if whole and any(os.path.isabs(one) and Path(whole).is_relative_to(os.path.normpath(one)) for one in allowed):
        return whole
    served = "the served model, " if field == "model" else ""
    message = f"{field} is {model[:200]!r}, must be {served}one of --allowed-weights, or below one of them"
    raise PagodaError(message, field=field, code=Code.PERMISSION_DENIED)


def _number(request: Request, name: str) -> int | None:
    """A number of the query; None when it is not there."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise InvalidRequest(f"{name} is {text!r}, must be a number", field=name)
    return int(text)
