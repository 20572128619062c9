"""Hold: keeps a worker group from serving for as long as someone needs it so. Knows no group and no gRPC."""

import asyncio


class Hold:
    """Two sides: who wants the group not to serve, and the group, which obeys and says when it has."""

    def __init__(self) -> None:
        self._is_wanted = asyncio.Event()
        self._is_over = asyncio.Event()
        self._is_at_rest = asyncio.Event()
        self.reason = ""
        """Why the group does not serve, for those who wait for it."""

    @property
    def is_wanted(self) -> bool:
        """Whether the group may not serve."""
        return self._is_wanted.is_set()

    def want(self, reason: str) -> None:
        """Keep the group from serving, from soon on."""
        self.reason = reason
        self._is_over.clear()
        self._is_wanted.set()

    async def wait_at_rest(self) -> None:
        """Return when the group has let its sequences go."""
        await self._is_at_rest.wait()

    def end(self) -> None:
        """The group may serve again."""
        self._is_wanted.clear()
        self._is_over.set()

    async def wait_wanted(self) -> None:
        """The group's side: return when it is to stop."""
        await self._is_wanted.wait()

    async def rest(self) -> None:
        """The group's side: it has stopped; return when it may serve again."""
        self._is_at_rest.set()
        try:
            await self._is_over.wait()
        finally:
            self._is_at_rest.clear()
