"""Models of installed packages, by the entry points of the group `pagoda.models`. Knows no model."""

import logging
from collections.abc import Sequence
from typing import cast

from pagoda_common.errors import ModelLoadError
from pagoda_common.process.entry_points import entry_points
from pagoda_worker.models.model import ModelFactory

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "pagoda.models"


def installed_factory(architectures: Sequence[str]) -> ModelFactory | None:
    """The factory of an installed package for an architecture; None if there is none.

    Args:
        architectures: names in config.json; an entry point has one of them as its name.

    Raises:
        ModelLoadError: it cannot be imported, or is not callable.
    """
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    entry = next((found[name] for name in architectures if name in found), None)
    if entry is None:
        return None
    try:
        factory = entry.load()
    except Exception as error:  # whatever the code of others raises
        raise ModelLoadError(
            f"the model of {entry.name} ({entry.value}) cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(factory):
        raise ModelLoadError(f"the model of {entry.name} ({entry.value}) must be a class or a function")
    logger.info("%s is a model of %s", entry.name, entry.value)
    return cast("ModelFactory", factory)
