"""``python -m pagoda.entrypoints.cli.main`` is ``pagoda``."""

import sys

from pagoda.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
