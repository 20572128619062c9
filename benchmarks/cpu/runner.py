"""Measures one workload on one engine. Engines stay loaded between rounds, stopped while others are measured."""

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.cpu.engines.catalog import Engine, Setup
from benchmarks.cpu.http_load import send_all, wait_until_served
from benchmarks.cpu.session import Driver, EngineFailure, EngineGone, child, last_line
from benchmarks.cpu.shapes import Shape
from benchmarks.cpu.workloads import Workload, warm_up
from benchmarks.idle import wait_until_idle
from pagoda_common.process.children import free_port

SETTLE_S = 20.0
"""Longest wait for what an engine still does after its last answer: Pagoda takes memory for its cache at rest."""


@dataclass
class Session:
    """A loaded engine: its driver, or the URL of its server."""

    process: subprocess.Popen[bytes]
    stack: ExitStack
    """Ends it."""
    driver: Driver | None = None
    url: str = ""
    model: str = ""
    warmed: set[str] = field(default_factory=set)
    """Workloads that have run untimed."""


class Runner:
    """All engines of one shape. Leaving it ends them."""

    def __init__(self, *, setup: Setup, shape: Shape, logs: Path, timeout_s: float) -> None:
        """
        Args:
            logs: folder for what the engines print.
            timeout_s: longest time for loading a model, and for one measurement.
        """
        self.versions: dict[str, dict[str, str]] = {}
        self._setup = setup
        self._shape = shape
        self._logs = logs
        self._timeout_s = timeout_s
        self._sessions: dict[tuple[str, bool], Session] = {}
        self._gone: dict[tuple[str, bool], str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for session in self._sessions.values():
            session.stack.close()

    def measure(self, engine: Engine, workload: Workload, *, place: int, in_process: bool = False) -> dict[str, float]:
        """Run `workload` once; figures in seconds, tokens a second and tokens.

        Args:
            place: number of the round: each has its own prompts, so that none is cached.
            in_process: give a served workload to the library, as many at a time.

        Raises:
            EngineFailure: the engine is not installed, ended, took too long or gave something else.
        """
        key = engine.name, workload.is_served and not in_process
        if key in self._gone:
            raise EngineFailure(self._gone[key])
        try:
            session = self._session(engine, key)
            wait_until_idle(timeout_s=SETTLE_S)
            with awake(session.process, can_stop=engine.can_stop):
                if workload.name not in session.warmed:
                    self._run(session, warm_up(workload), seed="warm-up", max_len=workload.max_len)
                    session.warmed.add(workload.name)
                return self._run(session, workload, seed=str(place), max_len=workload.max_len)
        except EngineGone as error:
            self._gone[key] = str(error)
            if key in self._sessions:
                self._sessions.pop(key).stack.close()
            raise

    def _session(self, engine: Engine, key: tuple[str, bool]) -> Session:
        if key not in self._sessions:
            with ExitStack() as stack:
                session = self._serve(engine, stack) if key[1] else self._load(engine, stack)
                session.stack = stack.pop_all()
            self._sessions[key] = session
        return self._sessions[key]

    def _log(self, engine: Engine, kind: str) -> Path:
        log = self._logs / f"{self._shape.name}-{engine.name}-{kind}.log"
        log.unlink(missing_ok=True)
        return log

    def _load(self, engine: Engine, stack: ExitStack) -> Session:
        log = self._log(engine, "library")
        command = engine.command(self._setup, self._shape)
        process = stack.enter_context(child(command, log=log, env=engine.env(self._setup)))
        driver = Driver(process, log=log)
        self.versions[engine.name] = driver.ready(self._timeout_s)["versions"]
        return Session(process, stack, driver=driver)

    def _serve(self, engine: Engine, stack: ExitStack) -> Session:
        assert engine.serve is not None
        model, port, log = engine.model(self._setup, self._shape), free_port(), self._log(engine, "server")
        command = engine.serve(engine, self._setup, model, port)
        env = engine.env(self._setup)
        process = stack.enter_context(child(command, log=log, env=env, stdout_to_log=True))
        url = f"http://127.0.0.1:{port}"
        try:
            ready, is_alive = url + engine.ready_path, lambda: process.poll() is None
            asyncio.run(wait_until_served(ready, timeout_s=self._timeout_s, is_alive=is_alive))
        except EngineGone as error:
            raise EngineGone(f"{error} (see {log}): {last_line(log)}") from None
        return Session(process, stack, url=url, model=str(model))

    def _run(self, session: Session, workload: Workload, *, seed: str, max_len: int) -> dict[str, float]:
        prompts = workload.prompts(vocab_size=self._shape.vocab_size, seed=seed)
        if session.driver is not None:
            return session.driver.run(
                prompts,
                num_outputs=workload.num_outputs,
                concurrency=workload.concurrency,
                is_stream=len(prompts) == 1,
                max_len=max_len,
                timeout_s=self._timeout_s,
            )
        started = time.perf_counter()
        answers = asyncio.run(
            send_all(
                f"{session.url}/v1/completions",
                session.model,
                prompts,
                num_outputs=workload.num_outputs,
                concurrency=workload.concurrency,
                timeout_s=self._timeout_s,
            )
        )
        seconds = time.perf_counter() - started
        num_tokens = sum(answer.num_tokens for answer in answers)
        if num_tokens != workload.num_output_tokens:
            raise EngineFailure(f"the server counts {num_tokens} tokens, {workload.num_output_tokens} were asked for")
        ttft_s = statistics.median(answer.ttft_s for answer in answers)
        return {"seconds": seconds, "output_tok_s": num_tokens / seconds, "ttft_s": ttft_s}


@contextmanager
def awake(process: subprocess.Popen[bytes], *, can_stop: bool) -> Iterator[None]:
    """Let the processes of a session run, and stop them again where they may be stopped."""
    if not can_stop:
        yield
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGSTOP)
