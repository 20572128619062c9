"""ExecuteStream: the answers of one Execute stream, in order, while its requests are still being read.

Uses plain callbacks instead of tasks, queues and semaphores, because this code runs during every step, and each turn of
the event loop takes the interpreter from the computing thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from pagoda.v1 import worker_pb2
from pagoda_worker.rpc.fence import MAX_STEPS_AHEAD


class StepAnswer:
    """The answer of a step: a message or a failure, set once. Any number of streams may wait for it."""

    __slots__ = ("_error", "_listeners", "_message")

    def __init__(self) -> None:
        self._message: worker_pb2.SamplerOutput | None = None
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_there(self) -> bool:
        """Whether `result` would return or raise."""
        return self._message is not None or self._error is not None

    def give(self, message: worker_pb2.SamplerOutput) -> None:
        """Set the step's message."""
        self._message = message
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Set the step's failure."""
        self._error = error
        self._tell()

    def _tell(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def when_there(self, listener: Callable[[], None]) -> None:
        """Call `listener` when there is a result; at once if there already is one."""
        if self.is_there:
            listener()
        else:
            self._listeners.append(listener)

    def result(self) -> worker_pb2.SamplerOutput:
        """The message of a finished step.

        Raises:
            Exception: the step failed.
        """
        if self._error is not None:
            raise self._error
        assert self._message is not None, "wait for it first"
        return self._message


class ExecuteStream:
    """A queue of pending answers. One reader puts, one writer takes."""

    def __init__(self) -> None:
        self._answers: deque[StepAnswer] = deque()
        self._num_taken_on = 0
        """Number of accepted steps that are not written yet."""
        self._is_written = True
        self._is_ended = False
        self._writer = _Waiter()
        self._reader = _Waiter()

    async def has_room(self) -> None:
        """Wait until another step may be accepted, and count it."""
        while self._num_taken_on >= MAX_STEPS_AHEAD:
            await self._reader.wait()
        self._num_taken_on += 1

    def put(self, answer: StepAnswer) -> None:
        """Queue the next answer, finished or not."""
        self._answers.append(answer)
        answer.when_there(self._writer.wake)

    def end(self, error: BaseException | None = None) -> None:
        """No more answers follow; with an error the stream fails after the pending ones."""
        if error is not None:
            failed = StepAnswer()
            failed.fail(error)
            self._answers.append(failed)
        self._is_ended = True
        self._writer.wake()

    async def next(self) -> worker_pb2.SamplerOutput | None:
        """Wait for the next answer; None at the end. The one before then counts as written.

        Raises:
            Exception: the step or the stream failed.
        """
        if not self._is_written:
            self._is_written = True
            self._num_taken_on -= 1
            self._reader.wake()
        while not (self._answers and self._answers[0].is_there):
            if self._is_ended and not self._answers:
                return None
            await self._writer.wait()
        self._is_written = False
        return self._answers.popleft().result()


class _Waiter:
    """An event for one waiting coroutine; further `wake` calls have no effect."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until the next `wake`."""
        self._future = asyncio.get_running_loop().create_future()
        await self._future

    def wake(self) -> None:
        """Let the waiting coroutine continue."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
