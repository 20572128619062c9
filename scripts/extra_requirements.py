"""Print requirements of extras of pyproject.toml, one a line: ``python scripts/extra_requirements.py frontend otel``.

A thin image installs these and then the wheel with --no-deps: the wheel's own list is that of all three services.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(extra: str) -> list[str]:
    """Requirements of `extra`, with those of the extras it names (``pagoda-llm[scheduler]``) in their place.

    Raises:
        KeyError: there is no such extra.
    """
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    found: list[str] = []
    for requirement in project["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", requirement)
        found += [line for name in own[1].split(",") for line in requirements(name)] if own else [requirement]
    return found


if __name__ == "__main__":
    print("\n".join(line for extra in sys.argv[1:] for line in requirements(extra)))
