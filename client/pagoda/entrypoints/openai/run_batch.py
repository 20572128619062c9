"""``python -m pagoda.entrypoints.openai.run_batch FLAGS`` is ``pagoda run-batch FLAGS``."""

import sys

from pagoda.cli import main

if __name__ == "__main__":
    sys.exit(main(["run-batch", *sys.argv[1:]]))
