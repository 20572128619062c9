"""FlexibleArgumentParser, under vLLM's module name."""

import argparse
import sys
from typing import Any

from pagoda_common.config.flags.words import dashed


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse's parser; flags may be typed with underscores: --max_model_len is --max-model-len."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse.ArgumentParser."""
        words, _ = dashed(sys.argv[1:] if args is None else list(args), self._option_string_actions)
        return super().parse_known_args(words, namespace)
