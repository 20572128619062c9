"""Where a model's files are: the embedded model, a directory, or a name on the model hub. Reads nothing."""

from pathlib import Path

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.errors import ModelLoadError

_EMBEDDED = Path(__file__).parents[1] / "models"


def resolve_model(name: str) -> Path | str:
    """The directory of a model that is on this machine, else the hub id.

    Raises:
        ModelLoadError: `name` is plainly a path, and there is no such directory.
    """
    if name == EMBEDDED_MODEL:
        return _EMBEDDED / EMBEDDED_MODEL
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"model {name!r} is not a directory", field="model")
    return name
