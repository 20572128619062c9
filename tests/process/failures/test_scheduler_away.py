"""A scheduler is killed under requests: frontends stay ready while it is away, for a bounded time."""

import asyncio
import json
import signal
import time

import httpx

from tests.process.deployment import Deployment, deployment
from tests.process.stack import get_status

FRONTENDS = ("frontend-0", "frontend-1")


def body(number: int, *, max_tokens: int = 40) -> dict[str, object]:
    return {"prompt": [200 + number] * 12, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def answer(http: httpx.AsyncClient, url: str, number: int) -> str:
    """Text of a completion that is not streamed."""
    response = await http.post(f"{url}/v1/completions", json=body(number))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def streamed(http: httpx.AsyncClient, url: str, number: int, begun: asyncio.Event) -> str:
    """Text of the same, streamed; `begun` is set with the first token."""
    text = ""
    async with http.stream("POST", f"{url}/v1/completions", json=body(number) | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                begun.set()
    return text


async def kill_scheduler(running: Deployment) -> None:
    running.processes["scheduler"].signal(signal.SIGKILL)
    await asyncio.to_thread(running.processes["scheduler"].wait)


async def test_frontends_stay_ready_and_requests_wait_while_a_killed_scheduler_is_away() -> None:
    async with deployment() as running, httpx.AsyncClient(timeout=240) as http:
        urls = [running.urls[name] for name in FRONTENDS]
        expected = [await answer(http, urls[0], number) for number in range(8)]
        begun = [asyncio.Event() for _ in range(4)]
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(streamed(http, urls[number % 2], number, event)) for number, event in enumerate(begun)
            ]
            for event in begun:
                await event.wait()
            await kill_scheduler(running)
            waiting = [tasks.create_task(answer(http, urls[number % 2], number)) for number in range(4, 8)]
            for url in urls:
                assert await asyncio.to_thread(get_status, f"{url}/ready") == 200, running.log
            assert not any(task.done() for task in waiting), "they were answered before there was a scheduler"
            running.start("scheduler")
        assert [task.result() for task in (*streams, *waiting)] == expected
        for url in urls:
            assert await asyncio.to_thread(get_status, f"{url}/ready") == 200, running.log


async def test_a_scheduler_that_stays_away_ends_readiness_after_the_bound() -> None:
    bound_s = 3.0
    async with (
        deployment(f"--recovery-timeout={bound_s:g}") as running,
        httpx.AsyncClient(timeout=240) as http,
    ):
        url = running.urls["frontend-0"]
        killed = time.monotonic()
        await kill_scheduler(running)
        refused = await http.post(f"{url}/v1/completions", json=body(0))
        assert refused.status_code == 503, refused.text
        assert refused.headers["retry-after"]
        assert "no connection to the scheduler" in refused.json()["error"]["message"]
        async with asyncio.timeout(240):
            while await asyncio.to_thread(get_status, f"{url}/ready") == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert time.monotonic() - killed >= bound_s
        assert await asyncio.to_thread(get_status, f"{url}/live") == 200
        running.start("scheduler")
        await running.ready("frontend-0")
        assert await answer(http, url, 0)
