"""How many tokens a second one frontend process streams to 256 SSE clients; its worker answers in no time.

    python -m benchmarks.frontend --json benchmarks/results/frontend.jsonl

Four processes: `python -m pagoda_frontend`, a scheduler, a fake worker, and this one with the clients: raw sockets that
count tokens and do nothing else. The figure is tokens per CPU second of the frontend: what it would carry on a core of
its own, however many cores the processes share here. A chunk may carry several tokens when they were there together.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import cast

import psutil
import uvloop

from benchmarks.tools.figures import Report, median, parser
from pagoda_common.process.children import free_port, spawn_service, stop_process

VOCAB_SIZE = 3072
"""Of pagoda-tiny, whose tokenizer the frontend has."""
PROMPT_TOKENS = 16
READY_TIMEOUT_S = 60.0
QUIET = {"PAGODA_LOG_LEVEL": "error"}


@dataclass(frozen=True, slots=True)
class RunningFrontend:
    """A frontend that serves."""

    port: int
    process: psutil.Process


@asynccontextmanager
async def frontend(*, num_clients: int, step_ms: float) -> AsyncIterator[RunningFrontend]:
    """A scheduler, a fake worker and a frontend, each a process."""
    scheduler_port, port = free_port(), free_port()
    address = f"127.0.0.1:{scheduler_port}"
    batch = ["--max-num-seqs", str(num_clients), "--max-num-batched-tokens", str(max(8192, 16 * num_clients))]
    worker_flags = ["--scheduler", address, "--vocab-size", str(VOCAB_SIZE), "--step-ms", str(step_ms)]
    flags = ["--scheduler", address, "--port", str(port), "--grpc-port", str(free_port())]
    flags += ["--model", "pagoda-tiny", "--tokenizer", "pagoda-tiny", "--disable-uvicorn-access-log"]
    async with AsyncExitStack() as stack:
        for module, module_flags in (
            ("pagoda_scheduler", ["--port", str(scheduler_port), *batch]),
            ("benchmarks.tools.fake_worker", worker_flags),
            ("pagoda_frontend", flags),
        ):
            process = spawn_service(module, module_flags, env=QUIET)
            stack.push_async_callback(asyncio.to_thread, stop_process, process, timeout_s=5)
        await asyncio.to_thread(_wait_until_ready, port)
        yield RunningFrontend(port=port, process=psutil.Process(process.pid))


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise TimeoutError(f"the frontend was not ready after {READY_TIMEOUT_S:g} s")


class Client(asyncio.Protocol):
    """One streamed completion over a socket of its own."""

    def __init__(self, *, number: int, num_tokens: int) -> None:
        self.done = asyncio.get_running_loop().create_future()
        """The completion_tokens of the usage that came last."""
        self.num_chunks = 0
        self.first_s = 0.0
        self._tail = b""
        body = {
            "prompt": [100 + (number * PROMPT_TOKENS + place) % 2000 for place in range(PROMPT_TOKENS)],
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        cast("asyncio.Transport", transport).write(self._request)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Count events; the last ones are kept for the usage."""
        self.first_s = self.first_s or time.perf_counter()
        self.num_chunks += data.count(b"data: ")
        self._tail = (self._tail + data)[-2048:]

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is whole."""
        _, found, rest = self._tail.rpartition(b'"completion_tokens":')
        if found and b"[DONE]" in rest:
            self.done.set_result(int(rest.partition(b",")[0]))
        else:
            self.done.set_exception(RuntimeError(f"a stream broke: {self._tail[-300:]!r}"))


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def stream_all(port: int, *, num_clients: int, num_tokens: int) -> tuple[int, int]:
    """Stream to all clients at once; tokens and chunks."""
    loop = asyncio.get_running_loop()
    clients = [Client(number=number, num_tokens=num_tokens) for number in range(num_clients)]
    for client in clients:
        # mypy cannot infer a lambda with a default
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    tokens = sum(await asyncio.gather(*(client.done for client in clients)))
    return tokens, sum(client.num_chunks for client in clients)


async def measure(*, num_clients: int, num_tokens: int, step_ms: float = 0.0) -> dict[str, float]:
    """One frontend under `num_clients` streams of `num_tokens` tokens."""
    async with frontend(num_clients=num_clients, step_ms=step_ms) as running:
        await stream_all(running.port, num_clients=num_clients, num_tokens=16)  # warm-up
        wall_s, before_s = time.perf_counter(), cpu_s(running.process)
        tokens, chunks = await stream_all(running.port, num_clients=num_clients, num_tokens=num_tokens)
        frontend_s, wall_s = cpu_s(running.process) - before_s, time.perf_counter() - wall_s
    assert tokens == num_clients * num_tokens
    return {"core": tokens / frontend_s, "wall": tokens / wall_s, "tokens_per_chunk": tokens / chunks}


async def run(
    report: Report, *, num_clients: int = 256, num_tokens: int = 400, num_rounds: int, step_ms: float = 0.0
) -> None:
    """Report `frontend_tokens_per_s_{num_clients}` and what belongs to it."""
    rounds = [await measure(num_clients=num_clients, num_tokens=num_tokens, step_ms=step_ms) for _ in range(num_rounds)]
    n = num_rounds * num_clients * num_tokens
    values = {name: median([result[name] for result in rounds]) for name in rounds[0]}
    report.add(f"frontend_tokens_per_s_{num_clients}", values["core"], "tokens/s of the frontend's core", n=n)
    report.add(f"frontend_wall_tokens_per_s_{num_clients}", values["wall"], "tokens/s, 4 processes together", n=n)
    report.add(f"frontend_tokens_per_chunk_{num_clients}", values["tokens_per_chunk"], "tokens in an event", n=n)


async def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--clients", type=int, default=256)
    flags.add_argument("--tokens", type=int, default=400, help="output tokens of each stream")
    flags.add_argument("--step-ms", type=float, default=0.0, help="milliseconds that a step of the fake worker takes")
    args = flags.parse_args()
    await run(
        Report(args.json),
        num_clients=args.clients,
        num_tokens=args.tokens,
        num_rounds=args.rounds,
        step_ms=args.step_ms,
    )


if __name__ == "__main__":
    uvloop.run(main())
