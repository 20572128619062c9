"""Hold: keeps a worker group from serving while an operation needs it. Knows no group and no gRPC."""

import asyncio


class Hold:
    """Has two sides: the operation, which asks the group to stop, and the group, which stops and confirms."""

    def __init__(self) -> None:
        self._is_wanted = asyncio.Event()
        self._is_over = asyncio.Event()
        self._is_at_rest = asyncio.Event()
        self.reason = ""
        """Reason for waiting requests why the group does not serve."""

    @property
    def is_wanted(self) -> bool:
        """Whether the group may not serve."""
        return self._is_wanted.is_set()

    def want(self, reason: str) -> None:
        """Ask the group to stop serving."""
        self.reason = reason
        self._is_over.clear()
        self._is_wanted.set()

    async def wait_at_rest(self) -> None:
        """Return when the group has given up its sequences."""
        await self._is_at_rest.wait()

    def end(self) -> None:
        """The group may serve again."""
        self._is_wanted.clear()
        self._is_over.set()

    async def wait_wanted(self) -> None:
        """The group's side: return when it must stop."""
        await self._is_wanted.wait()

    async def rest(self) -> None:
        """The group's side: confirm the stop; return when the group may serve again."""
        self._is_at_rest.set()
        try:
            await self._is_over.wait()
        finally:
            self._is_at_rest.clear()
