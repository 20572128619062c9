"""A private engine for LLM: scheduler and workers as child processes on loopback, restarted when they die."""

import asyncio
import logging
from collections import deque

from pagoda.server.early_checks import check_model
from pagoda.server.load_fault import find_load_fault
from pagoda.server.service_token import token_environment
from pagoda.server.worker_services import with_standby, worker_services
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.flags.flags import engine_config_to_argv
from pagoda_common.engine.client import EngineClient
from pagoda_common.errors import ModelLoadError
from pagoda_common.process.children import free_port, service_command
from pagoda_common.process.supervisor import Service, Supervisor

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
STOP_TIMEOUT_S = 5.0
NUM_TAIL_LINES = 30
"""Lines of the children's output that are kept for an error message."""
LOUD = ("WARNING ", "ERROR ", "CRITICAL ")
LOADING = "loading weights ["
"""Pattern of lines that report the progress of loading weights."""


class PrivateEngine:
    """Scheduler and workers of this process alone, by the token of `config`. They end with it, however it ends."""

    def __init__(self, *, config: EngineConfig) -> None:
        port = free_port()
        address = f"{LOOPBACK}:{port}"
        engine = engine_config_to_argv(with_standby(config))
        scheduler = [f"--host={LOOPBACK}", f"--port={port}", "--drain-timeout=0", *engine]
        command = tuple(service_command("pagoda_scheduler", scheduler))
        workers = worker_services(
            config, scheduler=address, host=LOOPBACK, drain_timeout_s=0.0, stop_timeout_s=STOP_TIMEOUT_S
        )
        environment = token_environment(config.security)
        scheduler_service = Service(
            name="scheduler", command=command, stop_timeout_s=STOP_TIMEOUT_S, environment=environment
        )
        services = [scheduler_service, *workers]
        self.client = EngineClient(address=address, security=config.security)
        """Connected while the engine runs."""
        self._config = config
        self._model = config.model.model
        self._security = config.security
        self._tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._supervisor = Supervisor(services=services, output=self._take_line)
        self._task: asyncio.Task[None] | None = None
        self._is_serving = False
        """Started and not yet stopped: warnings of the children are of interest."""

    async def start(self) -> None:
        """Start the processes, keep them running, and wait until `client` can generate.

        Raises:
            ConfigError: the model is none, or cannot be served so; no process was started.
            ModelLoadError: the model cannot be loaded, or a process cannot be kept running.
        """
        check_model(self._config)
        self._task = asyncio.create_task(self._run())
        await self.client.start()
        ready = asyncio.create_task(self.client.wait_until_ready())
        fault = asyncio.create_task(find_load_fault(self.client.address, security=self._security))
        try:
            await asyncio.wait([ready, fault, self._task], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                self._is_serving = True
                return
            reason = fault.result() if fault.done() else "its processes do not keep running"
            tail = "\n".join(self._tail)
            raise ModelLoadError(f"the engine for model {self._model!r} did not start: {reason}\n{tail}".rstrip())
        finally:
            ready.cancel()
            fault.cancel()

    async def stop(self) -> None:
        """End the processes; open requests fail."""
        self._is_serving = False
        await self.client.close("the engine was shut down")
        if self._task is not None:
            self._supervisor.stop()
            await self._task
            self._task = None

    async def _run(self) -> None:
        await self._supervisor.run()
        if self._is_serving:
            last_line = self._tail[-1] if self._tail else "no output"
            await self.client.close(f"the engine's processes do not keep running: {last_line}")

    def _take_line(self, service: str, line: str) -> None:
        self._tail.append(line)
        if self._is_serving and line.startswith(LOUD):
            logger.warning("%s", line)
        elif LOADING in line:
            logger.info("%s", line)
        else:
            logger.debug("%s", line)
