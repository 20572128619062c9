"""A fake scheduler on a thread of its own, so that synchronous clients can be tested against it."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from pagoda import LLM
from tests.fakes.fake_scheduler import FakeScheduler, serve_fake_scheduler


class FakeSchedulerThread:
    """Serves a fake until it is closed."""

    def __init__(self, fake: FakeScheduler) -> None:
        self.fake = fake
        self.address = ""
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._started.wait(240)

    async def _serve(self) -> None:
        async with serve_fake_scheduler(self.fake) as address:
            self.address = address
            self._started.set()
            await self._stop.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(240)
        self._loop.close()


@pytest.fixture(scope="module")
def scheduler_thread() -> Iterator[FakeSchedulerThread]:
    """Shared by a module: make it plain again with the `fake` fixture."""
    thread = FakeSchedulerThread(FakeScheduler())
    thread.fake.model_info.model = "pagoda-tiny"
    thread.fake.model_info.generation_config_json = '{"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 7}'
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def llm(scheduler_thread: FakeSchedulerThread) -> Iterator[LLM]:
    """In front of the module's fake."""
    with LLM(address=scheduler_thread.address) as llm:
        yield llm
