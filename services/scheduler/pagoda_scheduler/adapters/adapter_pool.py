"""AdapterPool: tracks the adapters in one group's workers, and decides which sequences may run with them. Knows
requests; no gRPC, no files.

An adapter is loaded when a waiting request needs it, concurrently with steps; meanwhile other requests are admitted. At
most `max_loras` adapters run in a step. When the workers' memory has more than `max_cpu_loras`, the least recently used
one without running sequences is evicted, unless it is pinned.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from pagoda_common.errors import PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.core.request import Request

PATIENCE = 64
"""Number of later sequences that may overtake one that waits for another adapter to stop running."""

Key = tuple[str, str, int]


@dataclass(slots=True)
class _Entry:
    adapter: LoraAdapter
    number: int
    """Number by which the workers know the adapter."""
    is_loaded: bool = False


class AdapterPool:
    """The adapters of one group of workers, from its start to its end."""

    def __init__(self, *, max_loras: int, max_cpu_loras: int) -> None:
        self._max_loras = max_loras
        self._max_host = max_cpu_loras
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        """Adapters in the workers' memory or being loaded, the least recently used first."""
        self._numbers = count(1)
        self._to_load: list[_Entry] = []
        self._to_remove: list[int] = []
        self._pinned: set[Key] = set()
        self._num_passed = 0
        self._active: set[Key] = set()
        """Adapters of running sequences, including those of the step that is being decided."""
        self._asked: set[Key] = set()
        """Adapters of waiting sequences that this step has considered: later ones do not displace them."""
        self._lacks_place = False

    def begin(self, running: Iterable[Request]) -> None:
        """Called before a step is decided; `running`: the running sequences."""
        self._active = {request.lora.key for request in running if request.lora is not None}
        self._asked.clear()
        self._lacks_place = False

    def can_run(self, request: Request, *, is_alone: bool = False) -> bool:
        """Whether a waiting sequence may enter the step; a missing adapter is requested.

        Args:
            is_alone: ignore the other running sequences.
        """
        if request.lora is None:
            return True
        key = request.lora.key
        self._asked.add(key)
        entry = self._entries.get(key)
        if entry is None:
            self._want(request.lora)
            return False
        self._entries.move_to_end(key)
        if not entry.is_loaded:
            return False
        if is_alone or key in self._active or len(self._active) < self._max_loras:
            return True
        self._lacks_place = True
        return False

    @property
    def is_impatient(self) -> bool:
        """Whether too many sequences have overtaken one that waits for other adapters to stop running."""
        return self._lacks_place and self._num_passed >= PATIENCE

    def admit(self, request: Request) -> None:
        """Note that a sequence starts running."""
        self._num_passed = self._num_passed + 1 if self._lacks_place else 0
        if request.lora is not None:
            self._active.add(request.lora.key)

    def number_of(self, request: Request) -> int:
        """Number by which the workers know the sequence's adapter; 0: no adapter."""
        return 0 if request.lora is None else self._entries[request.lora.key].number

    def pin(self, adapter: LoraAdapter, *, is_pinned: bool) -> None:
        """Pin an adapter in memory, loading it now if needed; or unpin it."""
        if not is_pinned:
            self._pinned.discard(adapter.key)
            return
        self._pinned.add(adapter.key)
        self.load(adapter)

    def load(self, adapter: LoraAdapter) -> None:
        """Load an adapter, if there is room."""
        if adapter.key not in self._entries:
            self._want(adapter)

    def forget(self, adapter: LoraAdapter) -> None:
        """An adapter was removed from the list: drop it when no sequence runs with it."""
        self._pinned.discard(adapter.key)
        if adapter.key in self._entries:
            self._entries.move_to_end(adapter.key, last=False)

    def is_loaded(self, adapter: LoraAdapter) -> bool:
        """Whether the workers have loaded it."""
        entry = self._entries.get(adapter.key)
        return entry is not None and entry.is_loaded

    # Called by the step loop.

    def take_loads(self) -> list[tuple[int, LoraAdapter]]:
        """Adapters that the workers must load now, with their numbers."""
        loads, self._to_load = [(entry.number, entry.adapter) for entry in self._to_load], []
        return loads

    def take_removals(self) -> list[int]:
        """Numbers of adapters that the workers drop with the next step."""
        removals, self._to_remove = self._to_remove, []
        return removals

    def loaded(self, adapter: LoraAdapter) -> None:
        """The workers have loaded it."""
        entry = self._entries.get(adapter.key)
        if entry is not None:
            entry.is_loaded = True

    def failed(self, adapter: LoraAdapter, waiting: Iterable[Request], error: PagodaError) -> list[Request]:
        """The workers cannot load it: returns the sequences that fail. A later request retries."""
        self._entries.pop(adapter.key, None)
        self._pinned.discard(adapter.key)
        failing = [one for one in waiting if one.lora is not None and one.lora.key == adapter.key]
        for request in failing:
            request.finish_reason, request.error = "error", error
        return failing

    def _want(self, adapter: LoraAdapter) -> None:
        while len(self._entries) >= self._max_host:
            victim = next((key for key, entry in self._entries.items() if self._may_go(key, entry)), None)
            if victim is None:
                return
            self._to_remove.append(self._entries.pop(victim).number)
        if adapter.is_pinned:
            self._pinned.add(adapter.key)
        entry = self._entries[adapter.key] = _Entry(adapter, next(self._numbers))
        self._to_load.append(entry)

    def _may_go(self, key: Key, entry: _Entry) -> bool:
        return entry.is_loaded and key not in self._active | self._pinned | self._asked
