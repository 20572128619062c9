"""The calls of LLM that free the engine's memory, restore it, and load other weights."""

from os import PathLike

from pagoda.llm.async_llm import AsyncLLM
from pagoda.llm.loop_thread import LoopThread
from pagoda_common.errors import NotReady


class MemoryCalls:
    """For a class that has an AsyncLLM and the loop on which it runs."""

    _async_llm: AsyncLLM
    _loop: LoopThread

    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Free the engine's memory until `wake_up`.

        Args:
            level: 1 moves the weights of a GPU to host memory; 2 drops them, and `wake_up` reads them again.
            mode: what happens to requests of other programs at a shared scheduler: keep or abort.

        Raises:
            PagodaError: a worker failed to sleep; it still serves.
        """
        self._loop.run(self._async_llm.sleep(level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up after `sleep`. With the tags ["weights"] only the weights return, and the engine keeps sleeping.

        Raises:
            PagodaError: the weights cannot be restored; the engine keeps sleeping.
        """
        self._loop.run(self._async_llm.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps: `generate` then needs `wake_up` first."""
        return self._loop.run(self._async_llm.is_sleeping())

    def reload_weights(self, model: str | PathLike[str], revision: str | None = None) -> None:
        """Load other weights of the same architecture, and use them from now on.

        Args:
            model: directory or hub id of the checkpoint, as the workers reach it.

        Raises:
            PagodaError: they cannot be read or do not fit; the old ones stay in use.
        """
        self._loop.run(self._async_llm.reload_weights(model, revision))

    def _check_awake(self) -> None:
        """Raises NotReady when the engine sleeps: the caller would wait, and could not wake it up."""
        if self._async_llm.engine.is_sleeping:
            raise NotReady("the model sleeps: call wake_up() first")
