"""Stores answers of /v1/responses for later calls, within a memory bound: the oldest are dropped first. No engine, no
HTTP."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from pagoda_common.errors import NotFound
from pagoda_common.text import exact_json

MAX_STORED_BYTES = 32 * 1024**2
"""Maximum memory of all stored answers with their conversations and events."""
TEXT_BYTES, OBJECT_BYTES = 50, 230
"""Bytes of memory of a text and of an object, in addition to its characters."""


def held_bytes_of(*values: Any) -> int:
    """Approximate bytes of memory of JSON values."""
    size = 0
    for value in values:
        text = exact_json.dumps(value)
        size += len(text) + TEXT_BYTES * (text.count(b'"') // 2) + OBJECT_BYTES * text.count(b"{")
    return size


@dataclass(eq=False)
class StoredResponse:
    """One answer with the conversation that it belongs to."""

    tenant: str
    """The owner, who alone can find the answer."""
    response: dict[str, Any]
    """The response object, as of now."""
    messages: list[dict[str, Any]]
    """The conversation without instructions; the answer is added when it is whole."""
    num_bytes: int = 0
    """Approximate bytes of memory of input, output and events."""
    task: asyncio.Task[None] | None = None
    """The task that generates a background answer."""
    input_items: list[dict[str, Any]] = field(default_factory=list)
    """The call's input, in OpenAI's shape."""
    events: list[bytes] | None = None
    """Events so far, if the answer is streamed in the background."""
    first_event: int = 0
    """Number of the first event; a lost frontend sent the events before it."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        """Whether the answer is still being generated."""
        return self.task is not None and not self.task.done()

    def add_events(self, events: list[bytes]) -> None:
        """Wake up followers, who read new events."""
        if self.events is not None:
            self.events += events
            self.num_bytes += sum(map(len, events))
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Events from number `start` (at least `first_event`), until the answer is whole."""
        assert self.events is not None
        assert self.task is not None
        start -= self.first_event
        while True:
            changed = self._changed
            if start < len(self.events):
                yield self.events[start]  # as it is: followers that do not read share it
                start += 1
            elif self.task.done():
                return
            else:
                waiter = asyncio.ensure_future(changed.wait())
                try:
                    await asyncio.wait({waiter, self.task}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiter.cancel()


class ResponseStore:
    """The stored answers."""

    def __init__(self, *, max_responses: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, stored: StoredResponse) -> None:
        """Keep `stored`; drop the oldest whole answers if there are too many."""
        if self._max_responses == 0:
            return
        self.remove(stored.response["id"])
        self._stored[stored.response["id"]] = stored
        self.trim(newest=stored)

    def trim(self, newest: StoredResponse | None = None) -> None:
        """Drop the oldest whole answers while the store is over its bounds; `newest` stays."""
        num_bytes = sum(one.num_bytes for one in self._stored.values())
        for response_id, old in list(self._stored.items()):
            if len(self._stored) <= self._max_responses and num_bytes <= self._max_bytes:
                break
            if not old.is_running and old is not newest:
                num_bytes -= old.num_bytes
                self.remove(response_id)

    def get(self, response_id: str, tenant: str) -> StoredResponse:
        """The answer of that id.

        Raises:
            NotFound: `tenant` has no answer with this id.
        """
        stored = self.find(response_id, tenant)
        if stored is None:
            message = f"Response with id '{response_id[:100]}' not found: it is not stored at this frontend."
            raise NotFound(message, field="response_id")
        return stored

    def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        """As `get`; None when there is none."""
        stored = self._stored.get(response_id)
        return stored if stored is not None and stored.tenant == tenant else None

    def remove(self, response_id: str) -> None:
        """Drop an answer; unknown ids are ignored."""
        self._stored.pop(response_id, None)

    def items(self, tenant: str) -> dict[str, dict[str, Any]]:
        """The output items of all answers of `tenant`, by id."""
        answers = (stored.response["output"] for stored in self._stored.values() if stored.tenant == tenant)
        return {item["id"]: item for output in answers for item in output}
