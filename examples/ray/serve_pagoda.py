"""Pagoda as an application of Ray Serve: each replica runs `pagoda serve`, and passes its requests on to it.

pip install "ray[serve]" httpx pagoda-llm
PAGODA_MODEL=Qwen/Qwen3-0.6B serve run --working-dir examples/ray serve_pagoda:app
curl http://127.0.0.1:8000/v1/models
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve

START_TIMEOUT_S = 3600
KEPT = ("authorization", "content-type", "accept", "x-request-id", "x-tenant-id")
"""Headers of a request that Pagoda reads."""
api = FastAPI()


def free_port() -> int:
    """One that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 2}, max_ongoing_requests=256)
@serve.ingress(api)
class Pagoda:
    """One engine."""

    def __init__(self) -> None:
        self._port = free_port()
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=None)

    async def _start(self) -> None:
        """Once; returns when a request would be served."""
        async with self._starting:
            if self._process is None:
                model = [os.environ["PAGODA_MODEL"]] if "PAGODA_MODEL" in os.environ else []
                command = ["pagoda", "serve", *model, f"--port={self._port}", f"--grpc-port={free_port()}"]
                self._process = await asyncio.create_subprocess_exec(*command)
            deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
            while not await self._is_ready():
                if self._process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                    raise RuntimeError(f"pagoda serve does not serve (exit code {self._process.returncode})")
                await asyncio.sleep(0.2)

    async def _is_ready(self) -> bool:
        try:
            return (await self._client.get("/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    async def check_health(self) -> None:
        """Ray replaces a replica whose engine does not come up again by itself."""
        await self._start()

    @api.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def forward(self, path: str, request: Request) -> StreamingResponse:
        """Any route of Pagoda; streams stay streams."""
        await self._start()
        headers = {name: value for name, value in request.headers.items() if name in KEPT}
        url = httpx.URL(path=f"/{path}", query=request.url.query.encode())
        call = self._client.build_request(request.method, url, headers=headers, content=await request.body())
        answer = await self._client.send(call, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()  # a client that leaves ends its request

        return StreamingResponse(body(), answer.status_code, media_type=answer.headers.get("content-type"))

    def __del__(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()


app = Pagoda.bind()  # type: ignore[attr-defined]  # ray: the decorator's type has no bind
