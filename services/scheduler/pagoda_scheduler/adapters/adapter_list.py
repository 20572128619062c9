"""AdapterList: the adapters that requests may name. The scheduler owns the list and sends it to frontends. No gRPC."""

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.errors import InvalidRequest, NotFound
from pagoda_common.params.lora_adapter import LoraAdapter

_SAFE_NAME = re.compile(r"[\w.-][\w.+ -]*(/[\w.-][\w.+ -]*)?")
"""Name of a folder in --lora-resolver-dir; an organisation may precede it, as in hub ids."""
FILE = "adapter_config.json"
MAX_ADAPTERS = 4096
"""Maximum length of the list, which is sent whole to every frontend with each change."""


class AdapterList:
    """Adapter names and their weights. `on_change` is called whenever the list changes."""

    def __init__(self, *, config: LoraConfig, on_change: Callable[[], None] = lambda: None) -> None:
        """Adapters of the command line are listed from the start; their version is 0."""
        self._config = config
        self._on_change = on_change
        self._adapters = {adapter.name: adapter for adapter in config.adapters}

    @property
    def is_on(self) -> bool:
        """Whether requests may use adapters at all."""
        return self._config.enable_lora

    @property
    def has_resolver(self) -> bool:
        """Whether unlisted names are looked up in the resolver's directory."""
        return bool(self._config.lora_resolver_dir)

    def listed(self) -> list[LoraAdapter]:
        """All adapters in order of name."""
        return [self._adapters[name] for name in sorted(self._adapters)]

    def get(self, name: str) -> LoraAdapter | None:
        """The adapter of a name."""
        return self._adapters.get(name)

    def find(self, name: str) -> LoraAdapter:
        """The adapter of a name.

        Raises:
            NotFound: there is none.
        """
        adapter = self._adapters.get(name)
        if adapter is None:
            raise NotFound(f"the adapter {name!r} does not exist", field="lora")
        return adapter

    def candidate(self, asked: LoraAdapter, *, load_inplace: bool) -> LoraAdapter:
        """The entry for `asked` in the list, if it can be loaded. Changes nothing.

        Raises:
            NotFound: it has no path, and the resolver's directory has no adapter of its name.
            InvalidRequest: adapters are off, or the name already has weights that must not be replaced.
        """
        if not self.is_on:
            raise InvalidRequest(f"lora_name is {asked.name!r}, adapters need --enable-lora", field="lora_name")
        known = self._adapters.get(asked.name)
        if known is not None and not load_inplace:
            if not asked.path:
                return known
            raise InvalidRequest(
                f"lora_name is {asked.name!r}, which is already loaded: set load_inplace to replace its weights",
                field="lora_name",
            )
        if known is None and len(self._adapters) >= MAX_ADAPTERS:
            raise InvalidRequest(
                f"lora_name is {asked.name!r}, but {len(self._adapters)} adapters are loaded, at most {MAX_ADAPTERS} "
                "are allowed: unload one",
                field="lora_name",
            )
        return LoraAdapter(
            name=asked.name,
            path=asked.path or self._resolve(asked.name),
            version=max(time.time_ns(), 0 if known is None else known.version + 1),
            base_model_name=asked.base_model_name,
            is_pinned=known is not None and known.is_pinned,
        )

    def put(self, adapter: LoraAdapter) -> None:
        """Add an adapter to the list, replacing one of the same name."""
        if self._adapters.get(adapter.name) != adapter:
            self._adapters[adapter.name] = adapter
            self._on_change()

    def remove(self, name: str) -> LoraAdapter:
        """Remove an adapter from the list; raises NotFound when it is not listed."""
        adapter = self.find(name)
        del self._adapters[name]
        self._on_change()
        return adapter

    def pin(self, name: str, *, is_pinned: bool) -> LoraAdapter:
        """Pin or unpin an adapter; raises NotFound when there is none of that name."""
        adapter = self.find(name).pinned(is_pinned)
        self.put(adapter)
        return adapter

    def learn(self, adapters: Iterable[LoraAdapter]) -> None:
        """Merge the list of an earlier scheduler, sent by a frontend; for each name, the newer weights win."""
        if not self.is_on:
            return
        for adapter in adapters:
            known = self._adapters.get(adapter.name)
            if known is None or known.version < adapter.version:
                self.put(adapter)

    def _resolve(self, name: str) -> str:
        """Raises NotFound."""
        root = self._config.lora_resolver_dir
        if root and _SAFE_NAME.fullmatch(name) and ".." not in name.split("/"):
            directory = Path(root).expanduser() / name
            if (directory / FILE).is_file():
                return str(directory.absolute())
        raise NotFound(f"the adapter {name!r} does not exist", field="lora_name")
