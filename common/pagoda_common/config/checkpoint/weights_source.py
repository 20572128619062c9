"""WeightsSource: the location of weights that replace those of the engine's checkpoint."""

from dataclasses import dataclass

from pagoda_common.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSource:
    """A checkpoint of the served architecture, and when it was named."""

    model: str
    """Directory or hub id."""
    revision: str | None = None
    """Hub revision."""
    version: int = 0
    """Unix time in nanoseconds of the call that named it: the higher one is the newer."""
    is_for_one_group: bool = False
    """Other worker groups are not meant to hold them."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is '', must be a directory or hub id", field="model")
