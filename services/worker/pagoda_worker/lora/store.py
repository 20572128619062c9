"""AdapterStore: the adapters in a worker's memory, by the numbers that steps use. Knows no messages."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.errors import ModelLoadError, NotFound
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_worker.lora.adapter import Adapter
from pagoda_worker.lora.peft_files import read_adapter
from pagoda_worker.lora.targets import LoraTargets

logger = logging.getLogger(__name__)

HUB_PATTERNS = ["adapter_config.json", "adapter_model.safetensors"]


class AdapterStore:
    """Adapters in host memory, with the last used ones on the device.

    `load` may run on any thread; the other methods are for the computing thread.
    """

    def __init__(
        self,
        *,
        config: LoraConfig,
        make_targets: Callable[[], LoraTargets],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`make_targets`: makes the targets of the loaded model."""
        self._config = config
        self._make_targets = make_targets
        self._targets: LoraTargets | None = None
        self._dtype = dtype
        self._device = device
        self._lock = threading.Lock()
        self._by_number: dict[int, Adapter] = {}
        self._by_key: OrderedDict[tuple[str, str, int], Adapter] = OrderedDict()
        """Loaded adapters, the least recently loaded first; after `forget_numbers` they stay while there is room."""
        self._on_device: OrderedDict[Adapter, Adapter] = OrderedDict()
        """Copies by their source, the least recently used first; none if the device uses host memory."""
        self._pinned: set[Adapter] = set()

    def load(self, number: int, name: LoraAdapter) -> Adapter:
        """Load an adapter into host memory, under a number.

        Raises:
            ModelLoadError, OutOfMemory: as `read_adapter`, or the path is neither a directory nor on the hub.
        """
        with self._lock:
            adapter = self._by_key.get(name.key)
        if adapter is None:
            started = time.monotonic()
            if self._targets is None:
                self._targets = self._make_targets()
            layers = read_adapter(
                find_adapter(name.path),
                targets=self._targets,
                dtype=self._dtype,
                max_rank=self._config.max_lora_rank,
                only=self._config.lora_target_modules,
            )
            adapter = Adapter.of(name, layers)
            if self._device.type == "cuda":
                adapter = adapter.pinned()  # here, beside the steps: what a step copies it does not wait for
            seconds, size = time.monotonic() - started, adapter.num_bytes / 2**20
            logger.info("adapter %s: rank %d, %.1f MiB, read in %.2f s", name.name, adapter.rank, size, seconds)
        with self._lock:
            self._by_key[name.key] = adapter
            self._by_key.move_to_end(name.key)
            self._by_number[number] = adapter
            self._make_room()
        return adapter

    def get(self, number: int) -> Adapter | None:
        """The adapter of a number; None if it is not loaded."""
        return self._by_number.get(number)

    def remove(self, number: int) -> None:
        """Drop an adapter; sequences that use it keep it."""
        with self._lock:
            adapter = self._by_number.pop(number, None)
            if adapter is not None and adapter not in self._by_number.values():
                self._by_key.pop(adapter.name.key, None)
                self._on_device.pop(adapter, None)
                self._pinned.discard(adapter)

    def pin(self, number: int, *, is_pinned: bool) -> None:
        """Pin an adapter on the device, or unpin it.

        Raises:
            NotFound: the number is unknown.
        """
        adapter = self.get(number)
        if adapter is None:
            raise NotFound(f"adapter {number} is not loaded", field="number")
        if is_pinned:
            self._pinned.add(adapter)
        else:
            self._pinned.discard(adapter)

    def forget_numbers(self) -> None:
        """Drop all numbers, for a new scheduler; loaded adapters stay while there is room."""
        with self._lock:
            self._by_number.clear()
            self._pinned.clear()

    def on_device(self, adapter: Adapter) -> Adapter:
        """The adapter on the device that computes."""
        if self._device.type == "cpu":
            return adapter
        copy = self._on_device.get(adapter)
        if copy is None:
            while len(self._on_device) >= self._config.max_loras:
                oldest = next((one for one in self._on_device if one not in self._pinned), None)
                del self._on_device[oldest or next(iter(self._on_device))]
            copy = self._on_device[adapter] = adapter.to(self._device)
        self._on_device.move_to_end(adapter)
        return copy

    def listed(self) -> list[tuple[int, Adapter, bool]]:
        """Numbers in order, with their adapters, and whether these are on the device."""
        is_host = self._device.type == "cpu"
        entries = sorted(self._by_number.items())
        return [(number, adapter, is_host or adapter in self._on_device) for number, adapter in entries]

    def _make_room(self) -> None:
        """Drop adapters without a number."""
        spare = len(self._by_key) - self._config.num_host
        named = set(self._by_number.values())
        for key in [key for key, adapter in self._by_key.items() if adapter not in named][: max(0, spare)]:
            del self._by_key[key]


def find_adapter(path: str) -> Path:
    """The directory of an adapter, downloaded from the hub if needed.

    Raises:
        ModelLoadError: it is neither a directory nor on the hub.
    """
    place = resolve_model(path)
    if isinstance(place, Path):
        return place
    from huggingface_hub import snapshot_download  # most adapters never need the hub

    try:
        return Path(snapshot_download(path, allow_patterns=HUB_PATTERNS))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ModelLoadError(
            f"adapter {path!r} is neither a directory nor could it be fetched from the hub: "
            f"{type(error).__name__}: {reason}"
        ) from error
