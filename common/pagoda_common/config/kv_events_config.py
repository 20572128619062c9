"""The options of --kv-events-config: whether KV cache events are made, and where they are published. vLLM's names."""

from dataclasses import dataclass, fields

from pagoda_common.config.checkpoint.generation_config import parse_object
from pagoda_common.errors import ConfigError

_FIELD = "kv_events_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVEventsConfig:
    """Events of the prefix cache."""

    enable_kv_cache_events: bool = False
    """Make them; VllmEngine.SubscribeKvEvents then has them."""
    publisher: str = "null"
    """``zmq`` also publishes them on a socket."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """ZMQ address of the PUB socket."""
    replay_endpoint: str | None = None
    """ZMQ address of a ROUTER socket that repeats what was missed."""
    topic: str = ""
    """First frame of every message."""
    hwm: int = 100_000
    """Messages that may wait for a subscriber; more are dropped."""

    def __post_init__(self) -> None:
        for name in ("publisher", "endpoint", "topic", "replay_endpoint"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "replay_endpoint" and value is None):
                raise ConfigError(f"{_FIELD}: {name} is {value!r}, must be a string", field=_FIELD)
        if self.publisher not in ("null", "zmq"):
            raise ConfigError(f"{_FIELD}: publisher is {self.publisher!r}, must be null or zmq", field=_FIELD)
        if not isinstance(self.enable_kv_cache_events, bool):
            wrong = f"enable_kv_cache_events is {self.enable_kv_cache_events!r}, must be true or false"
            raise ConfigError(f"{_FIELD}: {wrong}", field=_FIELD)
        if isinstance(self.hwm, bool) or not isinstance(self.hwm, int) or self.hwm < 1:
            raise ConfigError(f"{_FIELD}: hwm is {self.hwm!r}, must be at least 1", field=_FIELD)


def kv_events_config(text: str) -> KVEventsConfig:
    """The config in the JSON object `text`; the defaults for an empty text.

    Raises:
        ConfigError: it is no such object.
    """
    values = parse_object(text, field=_FIELD)
    known = {each.name for each in fields(KVEventsConfig)}
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{_FIELD}: unknown key {name!r}, must be one of {', '.join(sorted(known))}", field=_FIELD
            )
    return KVEventsConfig(**values)
