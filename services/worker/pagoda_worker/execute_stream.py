"""ExecuteStream: the answers of one Execute stream, in order, while its requests are still being read."""

import asyncio
from collections.abc import AsyncIterator

from pagoda.v1 import worker_pb2
from pagoda_worker.steps import MAX_STEPS_AHEAD

StepAnswer = asyncio.Future[worker_pb2.SamplerOutput]


class ExecuteStream:
    """A queue of answers that are on their way. One reader puts, one writer gets."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[StepAnswer | None] = asyncio.Queue()
        self._window = asyncio.Semaphore(MAX_STEPS_AHEAD)

    async def has_room(self) -> None:
        """Wait until another step may be taken on."""
        await self._window.acquire()

    def put(self, answer: StepAnswer) -> None:
        """The next answer, now or later."""
        self._answers.put_nowait(answer)

    def end(self, error: BaseException | None = None) -> None:
        """No more answers come; with an error the stream fails behind those that are on their way."""
        if error is None:
            self._answers.put_nowait(None)
            return
        failed: StepAnswer = asyncio.get_running_loop().create_future()
        failed.set_exception(error)
        failed.exception()  # nobody may be left to hear it
        self._answers.put_nowait(failed)

    async def answers(self) -> AsyncIterator[worker_pb2.SamplerOutput]:
        """Answers in order until the end."""
        while (answer := await self._answers.get()) is not None:
            # Shielded: another stream may wait for the same answer.
            yield await asyncio.shield(answer)
            self._window.release()
