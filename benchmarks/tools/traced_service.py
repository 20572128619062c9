"""Run a service and note when each token passes: `python -m benchmarks.tools.traced_service pagoda_scheduler FLAGS`.

For benchmarks/starvation.py. Wraps the functions that a token passes and appends rows to the file that the variable
PAGODA_TOKEN_TRACE names, every second and at the end. A row is [place, time, request, token], with seconds since the
epoch and the token's place in its stream, from 0:

    pushed    the scheduler has the step's result, and queues it for the frontend
    received  the frontend has taken the message
    sent      the frontend has given the token's event to its HTTP server

and [`lag`, time, seconds, 0] for each time at which the event loop ran more than 50 ms late, and for each step that
a worker has answered [`wire`, time, seconds, sequences], [`queue`, …] and [`compute`, …]: its parts outside of the
worker, in the worker before its turn, and in the worker's forward pass and sampling, with the number of running
sequences.
"""

import asyncio
import json
import os
import re
import runpy
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

VARIABLE = "PAGODA_TOKEN_TRACE"
TICK_S = 0.01
LATE_S = 0.05
SUFFIX_CHARS = 9
"""Of the engine's id of a request, beyond the client's."""
_EVENT_ID = re.compile(rb"^id: (\S+?):(\d+)", re.MULTILINE)

_rows: list[tuple[str, float, str | float, int]] = []


def _trace_scheduler() -> None:
    from pagoda_scheduler.engine.engine_core import EngineCore
    from pagoda_scheduler.rpc.sinks import SessionSink

    push = SessionSink.push

    def pushed(self: Any, result: Any) -> None:
        now = time.time()
        for request, offset in zip(result.requests, result.offsets, strict=True):
            _rows.append(("pushed", now, request.request_id[:-SUFFIX_CHARS], offset))
        push(self, result)

    SessionSink.push = pushed  # type: ignore[method-assign]  # a wrapper that notes the time
    step = EngineCore.step

    def stepping(self: Any, answer: Any = None) -> None:
        if answer is not None and answer.timings is not None:
            now, timings, num = time.time(), answer.timings, len(self.scheduler.running)
            parts = {"wire": timings.wire_ns, "queue": timings.queue_ns, "compute": timings.compute_ns}
            _rows.extend((part, now, took_ns / 1e9, num) for part, took_ns in parts.items())
        step(self, answer)

    EngineCore.step = stepping  # type: ignore[method-assign]  # a wrapper that notes the time


def _trace_frontend() -> None:
    from pagoda_common.engine.stream import EngineStream
    from pagoda_frontend.http.answers.sse import EventStream

    wake = EngineStream.wake

    def woken(self: Any, sequence: Any) -> None:
        name = self.request.request_id[:-SUFFIX_CHARS]
        _rows.append(("received", time.time(), name, len(sequence.token_ids) - 1))
        wake(self, sequence)

    EngineStream.wake = woken  # type: ignore[method-assign]  # a wrapper that notes the time
    send_events = EventStream._send_events

    async def sending(self: Any, events: AsyncGenerator[bytes], first: Any, send: Callable[..., Any]) -> None:
        async def noted(message: Any) -> None:
            for name, count in _EVENT_ID.findall(message.get("body", b"")):
                _rows.append(("sent", time.time(), name.decode(), int(count) - 1))
            await send(message)

        await send_events(self, events, first, noted)

    EventStream._send_events = sending  # type: ignore[method-assign]  # a wrapper that notes the time


async def _note_lags(path: Path) -> None:
    """Note how late this loop runs, and write what there is."""
    written_s = time.monotonic()
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        if (late_s := time.monotonic() - due) > LATE_S:
            _rows.append(("lag", time.time(), late_s, 0))
        if time.monotonic() - written_s > 1.0:
            written_s = time.monotonic()
            _write(path)


def _write(path: Path) -> None:
    rows = _rows[:]
    del _rows[: len(rows)]
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Command line."""
    module, path = sys.argv[1], Path(os.environ[VARIABLE])
    sys.argv = [module, *sys.argv[2:]]
    _trace_scheduler() if module == "pagoda_scheduler" else _trace_frontend()
    from pagoda_common.process import heartbeat

    beat = heartbeat.beat

    async def beating() -> None:
        await asyncio.gather(beat(), _note_lags(path))

    heartbeat.beat = beating
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        _write(path)


if __name__ == "__main__":
    main()
