"""A frontend on real sockets in this process, in front of a fake scheduler."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grpc.aio
import httpx
import openai
import orjson

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.rpc.service import connect
from pagoda_frontend.http.server import FrontendServer
from tests.fakes.fake_scheduler import FakeScheduler, serve_fake_scheduler

MODEL = "tiny"


@dataclass
class Running:
    """A frontend, its fake engine, and clients of both kinds."""

    fake: FakeScheduler
    server: FrontendServer
    http: httpx.AsyncClient
    channel: grpc.aio.Channel

    @cached_property
    def openai(self) -> openai.AsyncOpenAI:
        """Made for those who ask: it reads all certificates of the machine first."""
        return openai.AsyncOpenAI(base_url=f"{self.http.base_url}/v1", api_key="none", max_retries=0)

    async def close(self) -> None:
        """Close the clients."""
        if "openai" in self.__dict__:
            await self.openai.close()
        await self.channel.close()
        await self.http.aclose()

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """POST `body` as JSON."""
        return (
            await self.http.post(path, json=body, **kwargs)
            if body is not None
            else await self.http.post(path, **kwargs)
        )

    async def complete(self, **body: Any) -> dict[str, Any]:
        """The answer to a completion that succeeds."""
        response = await self.post("/v1/completions", {"model": MODEL, "prompt": [5, 6, 7], **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The decoded events of a stream, [DONE] included as text."""
        events = []
        async with self.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    payload = line.removeprefix("data: ")
                    events.append(payload if payload == "[DONE]" else orjson.loads(payload))
        return events


@contextlib.asynccontextmanager
async def running_frontend(fake: FakeScheduler | None = None, **config: Any) -> AsyncIterator[Running]:
    """A ready frontend; `config` are fields of FrontendConfig."""
    fake = fake or FakeScheduler()
    async with serve_fake_scheduler(fake) as address, frontend_at(address, fake, **config) as running:
        await until(lambda: running.server.serving.is_ready)
        yield running


@contextlib.asynccontextmanager
async def frontend_at(address: str, fake: FakeScheduler, **config: Any) -> AsyncIterator[Running]:
    """A frontend of the scheduler at `address`, which may not be there."""
    defaults: dict[str, Any] = {"tokenizer": "pagoda-tiny", "served_model_name": (MODEL, "alias")}
    server = FrontendServer(config=FrontendConfig(scheduler=address, port=0, grpc_port=0, **{**defaults, **config}))
    await server.start()
    # Neither of these reads certificates.
    http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=240, verify=False)
    running = Running(fake, server, http, connect(f"127.0.0.1:{server.grpc_port}"))
    try:
        yield running
    finally:
        await running.close()
        await server.close()


async def until(condition: Any, timeout_s: float = 240.0) -> None:
    """Wait for something that is about to happen."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (conditions are of any kind)
            await asyncio.sleep(0.005)


class EveryRequest(dict[str, Any]):
    """Says the same of every request id."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def get(self, key: str, default: Any = None) -> Any:
        return self._value
