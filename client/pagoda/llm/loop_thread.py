"""An event loop on a thread of its own, for a synchronous face on asynchronous code."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

CANCEL_TIMEOUT_S = 5.0


class LoopThread:
    """Runs coroutines for callers on other threads."""

    def __init__(self, *, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that an interpreter that ends gets as far as its exit handlers.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result. An exception in the waiting thread, such as Ctrl-C, cancels it first."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                done = threading.Event()
                self._loop.call_soon_threadsafe(self._cancel, future, done)
                done.wait(CANCEL_TIMEOUT_S)
            raise

    def _cancel(self, future: "concurrent.futures.Future[Any]", done: threading.Event) -> None:
        future.cancel()
        # The coroutine's own cleaning up takes a few turns of the loop.
        self._loop.call_later(0.05, done.set)

    def close(self) -> None:
        """End the loop and the thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CANCEL_TIMEOUT_S)
        with contextlib.suppress(RuntimeError):
            self._loop.close()
