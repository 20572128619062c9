"""Plugins: functions of installed packages that run in every process at its start. Knows no service.

A package names them as entry points of the group `pagoda.plugins`. A plugin takes no arguments. It runs in the
frontend, the scheduler, every worker and `pagoda serve`, again after each restart, in the order of names.
"""

import logging

from pagoda_common.errors import ConfigError
from pagoda_common.process.entry_points import entry_points

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "pagoda.plugins"


def run_plugins() -> None:
    """Call what is installed.

    Raises:
        ConfigError: one cannot be imported, or raises; the message names it. The process cannot start then.
    """
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        try:
            entry.load()()
        except Exception as error:  # whatever the code of others raises
            raise ConfigError(
                f"plugin {entry.name!r} ({entry.value}) failed: {type(error).__name__}: {error}", field="plugins"
            ) from error
        logger.info("plugin %s ran", entry.name)
