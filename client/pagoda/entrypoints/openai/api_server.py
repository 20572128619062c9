"""``python -m pagoda.entrypoints.openai.api_server FLAGS`` is ``pagoda serve FLAGS``."""

import sys

from pagoda.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
