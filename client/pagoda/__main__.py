"""``python -m pagoda`` is ``pagoda``."""

import sys

from pagoda.cli import main

if __name__ == "__main__":
    sys.exit(main())
