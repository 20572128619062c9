"""GrammarChecks: whether a constraint can be compiled, known before the engine sees the request. Knows no grammar."""

import asyncio
import logging
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from subprocess import DEVNULL, PIPE

import orjson

from pagoda_common.errors import InvalidRequest, NotReady, QueueFull
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.requests.structured import renamed

logger = logging.getLogger(__name__)

START_S = 120.0
COMPILE_S = 5.0
"""A constraint that is not compiled by then is refused."""
MAX_WAITING = 256
MAX_KNOWN = 1024
"""Answers that are remembered."""
TOO_COMPLEX = "structured_outputs is too complex to be compiled"

Key = bytes
Process = subprocess.Popen[bytes]


class GrammarChecks:
    """Asks a process of its own, which is started with the first constraint and started again when it breaks."""

    def __init__(
        self, *, tokenizer: str, revision: str | None, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """`tokenizer`: directory or hub id."""
        ends = ",".join(map(str, eos_token_ids))
        self._command = [sys.executable, "-m", "pagoda_common.grammar.grammar_process"]
        self._command += [tokenizer, revision or "", str(vocab_size), ends]
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._known: OrderedDict[Key, str | None] = OrderedDict()
        self._running: dict[Key, asyncio.Task[str | None]] = {}

    async def check(self, params: StructuredOutputsParams | None, *, field: str = "structured_outputs") -> None:
        """Return when an output can be made under `params`; None always can.

        Args:
            field: the request's field that `params` come from.

        Raises:
            InvalidRequest: it cannot be compiled, or not within the bounds on time and memory.
            QueueFull: too many others wait.
            NotReady: the process does not start, or `close` was called.
        """
        if params is None:
            return
        error = await self._error_of(params)
        if error is not None:
            raise renamed(InvalidRequest(error), field)

    async def close(self) -> None:
        """End the process."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._stop()

    async def _error_of(self, params: StructuredOutputsParams) -> str | None:
        fields = {**asdict(params), "start_after_token_ids": ()}
        key = orjson.dumps({"params": fields})
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} constraints wait to be compiled", retry_after_s=1)
            task = self._running[key] = asyncio.create_task(self._ask(key))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        # Others may wait for the same answer: it is not cancelled with us, and we are not cancelled with it.
        await asyncio.wait([task])
        if task.cancelled():
            raise NotReady("structured outputs are not checked any more: the server is shutting down", retry_after_s=1)
        return task.result()

    async def _ask(self, key: Key) -> str | None:
        async with self._turn:
            process = await self._started()
            error: str | None
            try:
                async with asyncio.timeout(COMPILE_S):
                    error = await self._exchange(process, key)
            except (TimeoutError, OSError, ValueError) as fault:
                logger.warning("a constraint broke the process that compiles it: %s", type(fault).__name__)
                error = TOO_COMPLEX
                await self._stop()
            except BaseException:
                await self._stop()  # its answer would be taken for the next one
                raise
        self._known[key] = error
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return error

    async def _exchange(self, process: Process, key: Key) -> str | None:
        error: str | None = orjson.loads(await asyncio.to_thread(_exchange, process, key + b"\n"))["error"]
        return error

    async def _started(self) -> Process:
        if self._process is not None and self._process.poll() is None:
            return self._process
        # Not by the loop: uvloop forks, gRPC's fork handlers run in the child, and now and then it crashes in them.
        self._process = process = await asyncio.to_thread(
            subprocess.Popen, self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        try:
            async with asyncio.timeout(START_S):
                line = await asyncio.to_thread(_exchange, process, b"")
            if not line:
                raise NotReady("structured outputs are not available: the process that compiles them does not start")
        except BaseException:
            await self._stop()
            raise
        return process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # ends an exchange that still waits, too
            await asyncio.to_thread(process.wait)


def _exchange(process: Process, line: bytes) -> bytes:
    """Write `line`, and read the next one; empty when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()
