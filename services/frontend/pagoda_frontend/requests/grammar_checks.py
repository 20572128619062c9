"""GrammarChecks: checks that a constraint compiles before the engine sees the request. Knows no grammar."""

import asyncio
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

import orjson

from pagoda_common.errors import InvalidRequest, NotReady
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.budget.helpers import HelperPool, JobFailed
from pagoda_frontend.requests.structured import renamed

COMPILE_S = 20.0
"""Wall-clock seconds after which a constraint is refused; the limit on processor time usually ends it much earlier."""
MAX_KNOWN = 4096
"""Number of cached results, of about 100 bytes each."""
TOO_COMPLEX = "structured_outputs is too complex to be compiled"

Key = bytes
"""Digest of a constraint, which may be 256 KiB long."""


class GrammarChecks:
    """Checks in helper processes, which start with the first constraint and restart after a failure."""

    def __init__(
        self, *, tokenizer: str, revision: str | None, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """`tokenizer`: directory or hub id."""
        ends = ",".join(map(str, eos_token_ids))
        command = [sys.executable, "-m", "pagoda_common.grammar.grammar_process"]
        command += [tokenizer, revision or "", str(vocab_size), ends]
        self.helpers = HelperPool(command, what="constraints to be compiled", max_job_s=COMPILE_S)
        """The helper processes."""
        self._known: OrderedDict[Key, str | None] = OrderedDict()
        self._running: dict[Key, asyncio.Task[str | None]] = {}

    async def check(self, params: StructuredOutputsParams | None, *, field: str = "structured_outputs") -> None:
        """Return if `params` compile; None needs no check.

        Args:
            field: the request's field that `params` come from.

        Raises:
            InvalidRequest: the constraint cannot be compiled, or not within the bounds on time and memory.
            QueueFull: too many constraints wait.
            NotReady: a process cannot be started, or `close` was called.
        """
        if params is None:
            return
        error = await self._error_of(params)
        if error is not None:
            raise renamed(InvalidRequest(error), field)

    async def close(self) -> None:
        """End the processes."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self.helpers.close()

    async def _error_of(self, params: StructuredOutputsParams) -> str | None:
        job = orjson.dumps({"params": {**asdict(params), "start_after_token_ids": ()}})
        key = hashlib.blake2b(job, digest_size=20).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._ask(job, key))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        # Others may wait for the same answer: it is not cancelled with us, and we are not cancelled with it.
        await asyncio.wait([task])
        if task.cancelled():
            raise NotReady("structured outputs are not checked any more: the server is shutting down", retry_after_s=1)
        return task.result()

    async def _ask(self, job: bytes, key: Key) -> str | None:
        error: str | None
        try:
            error = orjson.loads(await self.helpers.ask(job))["error"]
        except (JobFailed, orjson.JSONDecodeError):
            error = TOO_COMPLEX
        self._known[key] = error
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return error
