"""Write constraints.txt from this environment: ``python scripts/constraints.py``.

`pip install -c constraints.txt .` then installs the same versions again, of whatever Pagoda needs. Local parts of
versions (+cpu) are left out, so that the file fits every index.
"""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
OWN = "pagoda-llm"
LEFT_OUT = {"triton", "s3fs", "gcsfs"}
"""torch's build for CUDA asks for exactly its own triton, and each release of the other two for fsspec of its day."""
HEADER = "# Versions that the tests ran with: pip install -c constraints.txt . (made by scripts/constraints.py)"


def wanted() -> list[Requirement]:
    """What pyproject.toml asks for, with all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [found for line in lines if (found := Requirement(line)).name != OWN]


def installed(requirements: list[Requirement]) -> dict[str, str]:
    """Versions by name of `requirements` and of all that they need here."""
    versions: dict[str, str] = {}
    waiting = [(requirement, "") for requirement in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted_extra in ("", *requirement.extras):
            if (name, wanted_extra) in seen:
                continue
            seen.add((name, wanted_extra))
            try:
                found = distribution(name)
            except PackageNotFoundError:
                continue  # an extra that is not installed here
            versions[name] = found.version.partition("+")[0]
            waiting += [(Requirement(line), wanted_extra) for line in found.requires or ()]
    return versions


def text() -> str:
    """The file for this environment."""
    lines = (f"{name}=={version}" for name, version in sorted(installed(wanted()).items()))
    return "\n".join([HEADER, *lines]) + "\n"


if __name__ == "__main__":
    CONSTRAINTS.write_text(text(), encoding="utf-8")
