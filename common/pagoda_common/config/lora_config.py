"""LoraConfig: whether requests may use LoRA adapters, their limits, and the adapters at start."""

import json
from dataclasses import dataclass

from pagoda_common.errors import ConfigError, InvalidRequest
from pagoda_common.params.lora_adapter import LoraAdapter

CAPABILITY = "lora"
"""Capability of a worker that supports adapters."""
MODULE_KEYS = {"name", "path", "base_model_name"}
"""Keys of a JSON object in --lora-modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """LoRA adapters; off by default."""

    enable_lora: bool = False
    """Requests may name adapters."""
    max_loras: int = 8
    """Most adapters of one batch."""
    max_lora_rank: int = 64
    """Most columns of an adapter's matrices."""
    max_cpu_loras: int | None = None
    """Most adapters in a worker's host memory, at least max_loras; None is that."""
    lora_modules: tuple[str, ...] = ()
    """Adapters from the start: name=path, or a JSON object with name, path and base_model_name."""
    lora_target_modules: tuple[str, ...] = ()
    """Last parts of the names of modules that adapters may change; what they have of others is left out. Empty: all."""
    lora_resolver_dir: str = ""
    """A name that no one has added is looked for here: a folder of that name with a PEFT checkpoint. Empty: nowhere."""

    @property
    def num_host(self) -> int:
        """max_cpu_loras as a number."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def adapters(self) -> list[LoraAdapter]:
        """Those of `lora_modules`."""
        return [_adapter(text) for text in self.lora_modules]

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("max_loras", self.max_loras, 1, 1024),
            ("max_lora_rank", self.max_lora_rank, 1, 4096),
            ("max_cpu_loras", self.num_host, self.max_loras, 1 << 20),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}, must be between {low} and {high}", field=name)
        for name in ("lora_modules", "lora_target_modules", "lora_resolver_dir"):
            if getattr(self, name) and not self.enable_lora:
                raise ConfigError(f"{name} needs --enable-lora", field=name)
        names = [adapter.name for adapter in self.adapters]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ConfigError(f"lora_modules names {doubles[0]!r} twice", field="lora_modules")


def _adapter(text: str) -> LoraAdapter:
    """One of `lora_modules`.

    Raises:
        ConfigError: it is neither form.
    """
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"lora_modules has {text!r}, which is not JSON: {error}", field="lora_modules") from error
        unknown = sorted(given.keys() - MODULE_KEYS)
        if unknown:
            message = f"lora_modules has the key {unknown[0]!r}, must have {', '.join(sorted(MODULE_KEYS))}"
            raise ConfigError(message, field="lora_modules")
        name, path, base = given.get("name"), given.get("path"), given.get("base_model_name") or ""
    else:
        name, _, path = text.partition("=")
        base = ""
    if not all(isinstance(value, str) for value in (name, path, base)) or not name or not path:
        raise ConfigError(f"lora_modules has {text!r}, must be name=path or an object with both", field="lora_modules")
    try:
        return LoraAdapter(name=name, path=path, base_model_name=base)
    except InvalidRequest as error:
        raise ConfigError(f"lora_modules has {text!r}: {error.message}", field="lora_modules") from error
