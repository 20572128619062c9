"""llama.cpp through its own server, the only public face that batches. Options: server (path of llama-server).

The server is started again, untimed, for each number of slots: every workload gets as many as it has requests.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import aiohttp

from benchmarks.cpu.engines.driver import main
from benchmarks.cpu.http_load import wait_until_served
from pagoda_common.process.children import free_port

LOAD_TIMEOUT_S = 60.0


def server_command(server: str, model: str, *, threads: int, num_parallel: int, max_len: int, port: int) -> list[str]:
    """llama-server with `num_parallel` slots of `max_len` tokens each; prompt cache as by default."""
    return [
        server,
        *("--model", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(threads), "--threads-batch", str(threads)),
        *("--parallel", str(num_parallel), "--ctx-size", str(num_parallel * max_len)),
        *("--no-webui", "--log-verbosity", "1"),
    ]


class LlamaCppEngine:
    """A server of our own and requests with token ids to its /completion."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._server: subprocess.Popen[bytes] | None = None
        self._slots: tuple[int, int] | None = None
        self._url = ""
        self.prepare(num_parallel=1, max_len=args.max_model_len)

    def prepare(self, *, num_parallel: int, max_len: int) -> None:
        """Start a server with the slots that the workload wants, of a multiple of 256 tokens each, unless it runs."""
        slots = (num_parallel, -(-(max_len + 8) // 256) * 256)
        if slots == self._slots:
            return
        self.close()
        port = free_port()
        command = server_command(
            self._args.options["server"],
            self._args.model,
            threads=self._args.threads,
            num_parallel=slots[0],
            max_len=slots[1],
            port=port,
        )
        server = self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        self._url = f"http://127.0.0.1:{port}/completion"
        health = f"http://127.0.0.1:{port}/health"
        asyncio.run(wait_until_served(health, timeout_s=LOAD_TIMEOUT_S, is_alive=lambda: server.poll() is None))
        self._slots = slots
        self.generate([[place % 64 + 32] * 32 for place in range(num_parallel)], 2, 0)  # its first passes are slower

    def stream(self, prompt: list[int], num_outputs: int) -> list[float]:
        """When each token came."""
        return asyncio.run(self._stream(prompt, num_outputs))

    async def _stream(self, prompt: list[int], num_outputs: int) -> list[float]:
        times: list[float] = []
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._url, json=_body(prompt, num_outputs, is_stream=True)) as response,
        ):
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: "):  # a token that is part of a character comes with the next one
                    times += [time.perf_counter()] * (json.loads(line[6:])["tokens_predicted"] - len(times))
        return times

    def generate(self, prompts: list[list[int]], num_outputs: int, concurrency: int) -> int:
        """All prompts, one request each, all at once; the number of tokens generated."""
        return asyncio.run(self._generate(prompts, num_outputs))

    async def _generate(self, prompts: list[list[int]], num_outputs: int) -> int:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(prompt: list[int]) -> int:
                async with session.post(self._url, json=_body(prompt, num_outputs, is_stream=False)) as response:
                    response.raise_for_status()
                    return int((await response.json())["tokens_predicted"])

            return sum(await asyncio.gather(*map(one, prompts)))

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._server = self._slots = None


def _body(prompt: list[int], num_outputs: int, *, is_stream: bool) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": num_outputs,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": True,
        "return_tokens": True,
        "stream": is_stream,
    }


if __name__ == "__main__":
    main(LlamaCppEngine, ())
