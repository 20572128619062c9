"""HelperPool: runs jobs that may take much time, memory or stack in processes that can be ended. Knows no job."""

import asyncio
import logging
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from subprocess import DEVNULL, PIPE

from pagoda_common.errors import NotReady
from pagoda_frontend.budget.work_pool import FairQueue

logger = logging.getLogger(__name__)

START_S = 120.0
NUM_PROCESSES = 2
MAX_WAITING = 256

Process = subprocess.Popen[bytes]


class JobFailed(Exception):
    """The job exceeded its limits, and its process has ended."""


class HelperPool:
    """Processes that start with the first jobs, and restart after a failure.

    Each prints a line when it is ready, then answers each line that it reads with a line.
    """

    def __init__(
        self, command: Sequence[str], *, what: str, max_job_s: float, num_processes: int = NUM_PROCESSES
    ) -> None:
        """
        Args:
            what: names the jobs in errors.
            max_job_s: wall-clock limit of one job; the processes' own limits are lower.
        """
        self.command = list(command)
        self.max_job_s = max_job_s
        self._what = what
        self._queue: FairQueue[bytes] = FairQueue(
            num_places=num_processes, max_each=1, max_waiting=MAX_WAITING, what=what
        )
        self._executor = ThreadPoolExecutor(max_workers=num_processes, thread_name_prefix="helpers")
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._is_closed = False

    async def ask(self, line: bytes) -> bytes:
        """The answer to a job, both without line ends. One large job of a caller runs at a time; small ones run beside
        it.

        Raises:
            JobFailed: the job exceeded its limits.
            QueueFull: too many jobs wait.
            NotReady: the processes do not start, or `close` was called.
        """
        return await self._queue.run(lambda: self._do(line), size=len(line))

    async def close(self) -> None:
        """End the processes and the jobs that they run."""
        self._is_closed = True
        for process in list(self._all):
            await self._end(process)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _do(self, line: bytes) -> bytes:
        process = await self._ready()
        try:
            async with asyncio.timeout(self.max_job_s):
                answer = await self._exchange(process, line + b"\n")
        except (TimeoutError, OSError) as fault:
            answer = b""
            logger.warning(
                "ended the process for %s, which exceeded its limits in a job: %s", self._what, type(fault).__name__
            )
        except BaseException:
            await self._end(process)  # its answer would be taken for the next one
            raise
        if not answer.endswith(b"\n"):
            await self._end(process)
            if self._is_closed:
                raise NotReady(f"{self._what} are no longer accepted: the server is shutting down", retry_after_s=1)
            raise JobFailed
        self._idle.append(process)
        return answer

    async def _ready(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
            self._all.discard(process)
        if self._is_closed:
            raise NotReady(f"{self._what} are no longer accepted: the server is shutting down", retry_after_s=1)
        # Not started by the loop: uvloop forks, and gRPC's fork handlers sometimes crash the child.
        process = await asyncio.to_thread(
            subprocess.Popen, self.command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        self._all.add(process)
        try:
            async with asyncio.timeout(START_S):
                line = await self._exchange(process, b"")
            if not line:
                raise NotReady(f"cannot start the process for {self._what}")
        except BaseException:
            await self._end(process)
            raise
        return process

    async def _exchange(self, process: Process, line: bytes) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._executor, _exchange, process, line)

    async def _end(self, process: Process) -> None:
        self._all.discard(process)
        process.kill()  # ends an exchange that still waits, too
        await asyncio.to_thread(process.wait)


def _exchange(process: Process, line: bytes) -> bytes:
    """Write `line`, and read the next one; empty when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()
