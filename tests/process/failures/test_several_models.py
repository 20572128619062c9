"""Two frontends of two models with schedulers of their own: every process is killed under streams of both models."""

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagoda_common.process.children import free_port
from tests.process.stack import Process, get_status

STORIES = Path(__file__).resolve().parents[2] / "data/stories260K"
MODELS = {"tiny": "pagoda-tiny", "stories": str(STORIES)}
"""Their tokenizers differ."""
NUM_TOKENS = 120
PROMPTS = ("Once upon a time", "Tom had a dog.", "The sun was hot.")


@dataclass
class Fleet:
    """Processes by name: frontend-0, frontend-1, and of each model scheduler-NAME and worker-NAME."""

    processes: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    retired: list[Process] = field(default_factory=list)

    def port(self, name: str) -> int:
        """The port of a process, the same when it is started again."""
        return self.ports.setdefault(name, free_port())

    def start(self, name: str) -> None:
        """Start a process, or its successor."""
        kind, _, of = name.partition("-")
        if name in self.processes:
            self.retired.append(self.processes[name])
        schedulers = {model: f"127.0.0.1:{self.port(f'scheduler-{model}')}" for model in MODELS}
        argv = {
            "scheduler": [f"--model={MODELS.get(of)}", "--max-model-len=512"],
            "worker": [f"--scheduler={schedulers.get(of)}", "--threads=1"],
            "frontend": ["--grpc-port=0", "--models", *(f"{model}={at}" for model, at in schedulers.items())],
        }[kind]
        self.processes[name] = Process("-m", f"pagoda_{kind}", f"--port={self.port(name)}", *argv)

    async def kill(self, name: str) -> None:
        """SIGKILL; then its successor starts."""
        self.processes[name].signal(signal.SIGKILL)
        await asyncio.to_thread(self.processes[name].wait)
        self.start(name)

    def url(self, number: int) -> str:
        """Of a frontend."""
        return f"http://127.0.0.1:{self.port(f'frontend-{number}')}"

    async def ready(self) -> None:
        """Until both frontends are."""
        async with asyncio.timeout(240):
            for number in (0, 1):
                while await asyncio.to_thread(get_status, f"{self.url(number)}/ready") != 200:
                    assert all(process.popen.poll() is None for process in self.processes.values()), self.log
                    await asyncio.sleep(0.1)

    @property
    def log(self) -> str:
        """The end of all logs."""
        return "\n".join(f"--- {name}\n{process.log[-2500:]}" for name, process in self.processes.items())


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    try:
        for model in MODELS:
            fleet.start(f"scheduler-{model}")
            fleet.start(f"worker-{model}")
        for number in (0, 1):
            fleet.start(f"frontend-{number}")
        asyncio.run(fleet.ready())
        yield fleet
    finally:
        for process in (*fleet.processes.values(), *fleet.retired):
            process.end()


@dataclass
class Reader:
    """A client that reads a stream to its end, and resumes it at the other frontend when its connection breaks."""

    fleet: Fleet
    model: str
    prompt: str
    frontend: int
    text: str = ""
    last_id: str = ""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    num_resumed: int = 0
    _pending: str = ""

    async def read(self, http: httpx.AsyncClient) -> str:
        """The whole text."""
        async with asyncio.timeout(300):
            while True:
                with suppress(httpx.TransportError):
                    if await self._read_on(http):
                        return self.text
                self._pending = ""
                self.num_resumed += 1
                self.frontend = 1 - self.frontend
                await asyncio.sleep(0.05)

    async def _read_on(self, http: httpx.AsyncClient) -> bool:
        body: dict[str, Any] = {"model": self.model, "prompt": self.prompt, "max_tokens": NUM_TOKENS, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        headers = {"last-event-id": self.last_id} if self.last_id else {}
        url = f"{self.fleet.url(self.frontend)}/v1/completions"
        async with http.stream("POST", url, json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            event_id = ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line == "data: [DONE]":
                    self.text += self._pending
                    return True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    self._pending += event["choices"][0]["text"] if event["choices"] else ""
                    if event_id:  # what came since the last id comes again when it is resumed there
                        self.text, self._pending, self.last_id, event_id = self.text + self._pending, "", event_id, ""
                    self.has_begun.set()
        return False


def readers(fleet: Fleet) -> list[Reader]:
    """Streams of both models at both frontends."""
    return [Reader(fleet, model, prompt, number % 2) for number, prompt in enumerate(PROMPTS * 2) for model in MODELS]


async def read_all(fleet: Fleet, *killed: str) -> tuple[list[str], int]:
    """The texts of all streams, with these processes killed in the middle of them; how often streams were resumed."""
    async with httpx.AsyncClient(timeout=300) as http:
        reading = readers(fleet)
        tasks = [asyncio.create_task(reader.read(http)) for reader in reading]
        await asyncio.gather(*(reader.has_begun.wait() for reader in reading))
        for name in killed:
            await fleet.kill(name)
        texts = await asyncio.gather(*tasks)
        return list(texts), sum(reader.num_resumed for reader in reading)


async def test_streams_of_both_models_are_whole_whatever_is_killed(fleet: Fleet) -> None:
    expected, num_resumed = await read_all(fleet)
    assert num_resumed == 0
    by_model = dict(zip(MODELS, expected, strict=False))
    assert by_model["tiny"] != by_model["stories"]
    for killed in ("scheduler-stories", "worker-tiny", "frontend-0"):
        texts, _ = await read_all(fleet, killed)
        assert texts == expected, f"{killed}\n{fleet.log}"
        await fleet.ready()
    texts, _ = await read_all(fleet, "scheduler-tiny", "worker-stories")
    assert texts == expected, fleet.log
    assert "Traceback" not in "".join(process.log for process in (*fleet.processes.values(), *fleet.retired))


async def test_a_model_whose_scheduler_stays_away_holds_up_no_one_else(fleet: Fleet) -> None:
    await fleet.ready()
    process = fleet.processes["scheduler-stories"]
    process.signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait)
    async with httpx.AsyncClient(timeout=300) as http:
        body: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        url = f"{fleet.url(0)}/v1/completions"
        waiting = asyncio.create_task(http.post(url, json={**body, "model": "stories"}))
        for number in (0, 1):
            answer = await http.post(f"{fleet.url(number)}/v1/completions", json={**body, "model": "tiny"})
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert await asyncio.to_thread(get_status, f"{fleet.url(number)}/ready") == 200
        assert not waiting.done(), "it waits for its scheduler"
        fleet.start("scheduler-stories")
        assert (await waiting).status_code == 200, fleet.log
