"""What a module of transformers does, by its source: modules with the same parts may do something else with them."""

import inspect

from torch import nn


def does(module: nn.Module, lines: tuple[str, ...]) -> bool:
    """Whether these are all lines of its forward; False also where transformers is installed without sources."""
    try:
        source = inspect.getsource(type(module).forward).splitlines()
    except OSError:
        return False
    return tuple(line.strip() for line in source[1:]) == lines
