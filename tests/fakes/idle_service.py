"""A service that does nothing: says its pid and waits. ``python -m tests.fakes.idle_service``."""

import argparse
import os
import time

from pagoda_common.config.flags.flags import add_child_flags
from pagoda_common.process.children import die_with_parent

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_child_flags(parser)
    args = parser.parse_args()
    if args.die_with_parent is not None:
        die_with_parent(args.die_with_parent)
    print(os.getpid(), flush=True)
    time.sleep(600)
