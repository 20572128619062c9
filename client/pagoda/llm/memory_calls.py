"""The calls of LLM that give the engine's memory away and bring it, or other weights, back."""

from os import PathLike

from pagoda.llm.async_llm import AsyncLLM
from pagoda.llm.loop_thread import LoopThread
from pagoda_common.errors import NotReady


class MemoryCalls:
    """For a class that has an AsyncLLM and the loop on which it runs."""

    _async_llm: AsyncLLM
    _loop: LoopThread

    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Give the engine's memory away until `wake_up`.

        Args:
            level: 1 keeps the weights in host memory where the device has its own; 2 drops them, and `wake_up` reads
                them again.
            mode: of other programs' requests, where the scheduler is shared: keep or abort.

        Raises:
            PagodaError: a worker could not; it serves on.
        """
        self._loop.run(self._async_llm.sleep(level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """The end of `sleep`; with the tags ["weights"] the engine has its weights and sleeps on.

        Raises:
            PagodaError: the weights cannot come back; the engine sleeps on.
        """
        self._loop.run(self._async_llm.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Whether `wake_up` is to come before the next `generate`."""
        return self._loop.run(self._async_llm.is_sleeping())

    def reload_weights(self, model: str | PathLike[str], revision: str | None = None) -> None:
        """Use other weights of the same architecture from now on.

        Args:
            model: directory or hub id of the checkpoint, as the workers reach it.

        Raises:
            PagodaError: they cannot be read or do not fit; the old ones stay in use.
        """
        self._loop.run(self._async_llm.reload_weights(model, revision))

    def _check_awake(self) -> None:
        """Raises NotReady when the engine sleeps: who waits for an answer cannot wake it up."""
        if self._async_llm.engine.is_sleeping:
            raise NotReady("the model sleeps: call wake_up() first")
