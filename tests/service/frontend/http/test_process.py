"""`python -m pagoda_frontend` as a child process."""

import asyncio
import os
import re
import signal
import sys

import httpx

from tests.fakes.fake_scheduler import FakeScheduler, serve_fake_scheduler


async def read_until(stream: asyncio.StreamReader, pattern: str) -> re.Match[str]:
    """The first line that matches."""
    async with asyncio.timeout(240):
        async for line in stream:
            if match := re.search(pattern, line.decode()):
                return match
    raise AssertionError(f"the log ended without {pattern}")


async def test_it_prints_its_ports_drains_on_sigterm_and_exits_with_0() -> None:
    fake = FakeScheduler(step_s=0.01)
    fake.model_info.model = "pagoda-tiny"
    async with serve_fake_scheduler(fake) as address:
        command = [sys.executable, "-m", "pagoda_frontend", "--scheduler", address, "--port", "0", "--grpc-port", "0"]
        child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert child.stderr is not None
        try:
            url = (await read_until(child.stderr, r"frontend listening on (http://127.0.0.1:\d+)"))[1]
            await read_until(child.stderr, r"gRPC listening on 127.0.0.1:\d+")
            await read_until(child.stderr, r": ready")
            body = {"prompt": [5], "max_tokens": 60, "stream": True}
            async with (
                httpx.AsyncClient(base_url=url) as http,
                http.stream("POST", "/v1/completions", json=body) as got,
            ):
                lines = got.aiter_lines()
                await anext(lines)
                child.send_signal(signal.SIGTERM)
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in rest[-2]
            async with asyncio.timeout(240):
                assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


async def test_a_key_may_come_from_the_environment() -> None:
    fake = FakeScheduler()
    fake.model_info.model = "pagoda-tiny"
    async with serve_fake_scheduler(fake) as address:
        command = [sys.executable, "-m", "pagoda_frontend", "--scheduler", address, "--port", "0", "--grpc-port", "0"]
        env = {**os.environ, "PAGODA_API_KEY": "secret"}
        child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=env)
        assert child.stderr is not None
        try:
            url = (await read_until(child.stderr, r"frontend listening on (http://127.0.0.1:\d+)"))[1]
            await read_until(child.stderr, r": ready")
            async with httpx.AsyncClient(base_url=url) as http:
                assert (await http.get("/v1/models")).status_code == 401
                headers = {"Authorization": "Bearer secret"}
                assert (await http.get("/v1/models", headers=headers)).status_code == 200
        finally:
            child.kill()
            await child.wait()


async def test_a_chat_template_that_is_not_there_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "pagoda_frontend", "--chat-template", "missing.jinja", "--port", "0"]
    child = await asyncio.create_subprocess_exec(*command, "--grpc-port", "0", stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(child.communicate(), 240)
    assert child.returncode == 2
    assert b"--chat-template 'missing.jinja' cannot be read" in errors
