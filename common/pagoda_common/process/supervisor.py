"""Keeps child processes running: starts them, restarts those that die, ends them in order. Knows no gRPC, no model."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pagoda_common.process.children import service_environment
from pagoda_common.process.heartbeat import HeartbeatReader

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
"""Exit code of a child whose configuration is wrong: starting it again would not help."""
OUTPUT_GRACE_S = 1.0
"""Seconds for the last lines of a child that has ended: a grandchild may hold its pipe open forever."""
LINE_BYTES = 1 << 20
"""Longest line of a child's output; a longer one is dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A process to keep running."""

    name: str
    """Prefix of its log lines."""
    command: tuple[str, ...]
    """Program and arguments, the same for every start."""
    stop_timeout_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables on top of this process's: for secrets, as a command line is seen by everybody on the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """How soon and how often a child that died is started again."""

    first_delay_s: float = 0.1
    """Pause before the first restart; each further one doubles it."""
    max_delay_s: float = 10.0
    """Longest pause."""
    healthy_after_s: float = 5.0
    """A child that ran this long has recovered: its failures are forgotten."""
    silent_after_s: float = 6.0
    """A child whose heartbeats, once begun, are missing for so long hangs: it is killed. A load that holds the
    interpreter, or a machine that is short of cores, may silence a sound one for seconds."""
    stopped_after_s: float = 1.0
    """A child that a signal has stopped for so long is killed: of this there is no doubt."""
    max_failures: int = 10
    """Failures in a row after which the child is given up."""


class BackOff:
    """Counts one child's failures in a row and says how long to pause."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.num_failures = 0

    def next_delay_s(self, *, uptime_s: float) -> float | None:
        """Pause before the next start of a child that died after `uptime_s`; None: give it up."""
        if uptime_s >= self._policy.healthy_after_s:
            self.num_failures = 0
        self.num_failures += 1
        if self.num_failures >= self._policy.max_failures:
            return None
        doubled: float = self._policy.first_delay_s * 2 ** (self.num_failures - 1)
        return min(doubled, self._policy.max_delay_s)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why everything has to end."""

    exit_code: int
    message: str


def describe_exit(code: int) -> str:
    """An exit code in words; negative ones are signals."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class Child:
    """One service and, while it runs, its process."""

    def __init__(self, service: Service, *, policy: RestartPolicy, output: Callable[[str, str], None]) -> None:
        self.service = service
        self.process: asyncio.subprocess.Process | None = None
        """The process of now; None before the first start and between two."""
        self._policy = policy
        self._back_off = BackOff(policy)
        self._output = output
        self._stopping = asyncio.Event()
        self._keeper: asyncio.Task[Failure | None] | None = None

    def start(self) -> asyncio.Task[Failure | None]:
        """Keep the service running from now on. The task ends after `stop`, or with the reason to give up."""
        self._keeper = asyncio.create_task(self._keep_running(), name=f"keep {self.service.name}")
        return self._keeper

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the service's stop_timeout_s; returns when the process is gone."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        if self._keeper is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._keeper), self.service.stop_timeout_s)
        except TimeoutError:
            logger.warning("%s did not end within %g s: killed", self.service.name, self.service.stop_timeout_s)
            self._signal(signal.SIGKILL)
            await self._keeper

    def kill(self) -> None:
        """SIGKILL, and no restart."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def _keep_running(self) -> Failure | None:
        name = self.service.name
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._run()
            if self._stopping.is_set():
                break
            if code == EXIT_CONFIG:
                return Failure(EXIT_CONFIG, f"{name} refused its configuration; its own message is above")
            delay_s = self._back_off.next_delay_s(uptime_s=time.monotonic() - started)
            if delay_s is None:
                num = self._back_off.num_failures
                return Failure(1, f"{name} failed {num} times in a row; the last time it {describe_exit(code)}")
            logger.warning("%s %s; starting it again in %g s", name, describe_exit(code), delay_s)
            try:
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            except TimeoutError:
                continue
        return None

    async def _run(self) -> int:
        # A pipe of our own: with asyncio's, wait() would last until grandchildren have closed it as well.
        read_end, write_end = os.pipe()
        heartbeat = HeartbeatReader()
        try:
            self.process = process = await asyncio.create_subprocess_exec(
                *self.service.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,  # the terminal's Ctrl-C is ours alone: we end children in order
                env={
                    **service_environment(self.service.command),
                    **heartbeat.environment(),
                    **self.service.environment,
                },
                pass_fds=(heartbeat.write_end,),
            )
        finally:
            heartbeat.started()
            os.close(write_end)
            pump = asyncio.create_task(self._pump(read_end), name=f"output of {self.service.name}")
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        watch = asyncio.create_task(
            heartbeat.watch(
                pid=process.pid,
                silent_after_s=self._policy.silent_after_s,
                stopped_after_s=self._policy.stopped_after_s,
                on_silence=self._kill_silent,
            ),
            name=f"heartbeats of {self.service.name}",
        )
        code = await process.wait()
        watch.cancel()
        await asyncio.wait([watch])
        heartbeat.close()
        await asyncio.wait([pump], timeout=OUTPUT_GRACE_S)
        pump.cancel()
        return code

    def _kill_silent(self, reason: str) -> None:
        if self._stopping.is_set():
            return  # `stop` has a bound of its own
        logger.error("%s hangs: %s; killed", self.service.name, reason)
        self._signal(signal.SIGKILL)

    async def _pump(self, read_end: int) -> None:
        lines = asyncio.StreamReader(limit=LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_end, "rb", buffering=0)
        )
        try:
            while not lines.at_eof():
                with contextlib.suppress(ValueError):  # a line beyond the limit
                    line = await lines.readline()
                    if line:
                        self._output(self.service.name, line.decode(errors="replace").rstrip())
        finally:
            transport.close()


class Supervisor:
    """Runs services until it is stopped, or until one of them cannot be kept running."""

    def __init__(
        self,
        *,
        services: Sequence[Service],
        output: Callable[[str, str], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        """Args:
        services: started together, ended one after the other in this order.
        output: called with (service name, line) for everything that children print.
        """
        self.children = [Child(service, policy=policy or RestartPolicy(), output=output) for service in services]
        self._stop = asyncio.Event()
        self._exit_code = 0

    def stop(self) -> None:
        """End all services in order; `run` returns 0."""
        self._stop.set()

    def kill(self, exit_code: int) -> None:
        """End all services at once; `run` returns `exit_code`."""
        self._exit_code = exit_code
        self._stop.set()
        for child in self.children:
            child.kill()

    async def run(self) -> int:
        """Start and keep all services; returns the exit code when all of them have ended."""
        keepers = [child.start() for child in self.children]
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([*keepers, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        failures = [keeper.result() for keeper in keepers if keeper.done()]
        for failure in failures:
            if failure is not None and self._exit_code == 0:
                logger.error("%s", failure.message)
                self._exit_code = failure.exit_code
        for child in self.children:
            await child.stop()
        return self._exit_code
