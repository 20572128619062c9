"""A whole stack for the length of one command: started, waited for, ended."""

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from pagoda.server.load_fault import find_load_fault
from pagoda.server.local_stack import LocalStack
from pagoda_common.errors import ModelLoadError
from pagoda_common.process.supervisor import Supervisor

NUM_TAIL_LINES = 30
"""Lines of the services' output that are kept for an error message."""


@asynccontextmanager
async def running_stack(
    stack: LocalStack, *, on_reason: Callable[[str], None] | None = None
) -> AsyncGenerator[str, None]:
    """Run `stack` and give its URL once it can answer. Its output is shown only when it does not get so far.

    Args:
        on_reason: called with the reason why it is not ready yet, whenever the reason changes.

    Raises:
        ModelLoadError: the model cannot be loaded, or a service cannot be kept running.
    """
    tail: collections.deque[str] = collections.deque(maxlen=NUM_TAIL_LINES)
    supervisor = Supervisor(services=stack.services(), output=lambda name, line: tail.append(f"{name:<9} | {line}"))
    running = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(stack.wait_until_ready(on_reason))
    fault = asyncio.create_task(find_load_fault(stack.frontend.scheduler, security=stack.engine.security))
    try:
        await asyncio.wait([running, ready, fault], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            reason = fault.result() if fault.done() else "its services do not keep running"
            lines = "\n".join(["", *tail]) if running.done() else ""
            raise ModelLoadError(f"cannot serve {stack.engine.model.model}: {reason}{lines}")
        yield stack.url
    finally:
        ready.cancel()
        fault.cancel()
        supervisor.stop()
        await running
