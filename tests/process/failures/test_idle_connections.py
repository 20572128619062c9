"""Two thousand connections that say nothing: a frontend keeps them, and answers every request."""

import asyncio
import contextlib
import re
import resource
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

from pagoda_common.process.children import raise_file_limit
from tests.fakes.fake_scheduler import FakeScheduler, serve_fake_scheduler

NUM_CONNECTIONS = 2000
BATCH = 100


@pytest.fixture
def files() -> Iterator[None]:
    """As many open files as this process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < NUM_CONNECTIONS + 500:
        pytest.skip(f"the system allows {resource.getrlimit(resource.RLIMIT_NOFILE)[1]} open files")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_frontend_with_two_thousand_idle_connections_answers(files: None) -> None:
    fake = FakeScheduler()
    fake.model_info.model = "pagoda-tiny"
    async with serve_fake_scheduler(fake) as address, contextlib.AsyncExitStack() as exits:
        command = [sys.executable, "-m", "pagoda_frontend", "--scheduler", address, "--port", "0", "--grpc-port", "0"]
        child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        exits.push_async_callback(child.wait)
        exits.callback(child.kill)
        assert child.stderr is not None
        port = 0
        async with asyncio.timeout(240):
            async for line in child.stderr:
                if match := re.search(rb"frontend listening on http://127.0.0.1:(\d+)", line):
                    port = int(match[1])
                if b": ready" in line:
                    break
        process = psutil.Process(child.pid)
        rss = process.memory_info().rss
        opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(NUM_CONNECTIONS // BATCH):
            opened += await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(BATCH)))
        async with asyncio.timeout(240):
            while process.num_fds() < NUM_CONNECTIONS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:
            answer = await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 8})
            assert answer.json()["usage"]["completion_tokens"] == 8
            assert (await http.get("/ready")).status_code == 200
        assert process.num_fds() >= NUM_CONNECTIONS
        assert process.memory_info().rss - rss < NUM_CONNECTIONS * 64 * 1024
        for _, writer in opened:
            writer.transport.abort()
