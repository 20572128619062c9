"""The licences of what each image installs: Python packages and what they need, as they are installed here.

    python scripts/licenses.py                        # all three images, as a table
    python scripts/licenses.py worker --format json
    python scripts/licenses.py --deny GPL --deny AGPL # code 1 when a licence has one of these words

Knows packages by their metadata alone: what the base image brings (Debian's packages) is in its /usr/share/doc.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
IMAGES = ("frontend", "scheduler", "worker")
UNKNOWN = "unknown"
MISSING = "not installed here"
MAX_LICENSE_CHARS = 60
"""Longer texts in the field `License` are a whole licence, whose first line names it."""


@dataclass(frozen=True, slots=True)
class Package:
    """One installed package."""

    name: str
    version: str
    license: str


def packages_of(image: str) -> list[Package]:
    """What the image installs, sorted by name. Packages that are not installed here have no version."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    waiting = [Requirement(text) for text in extras[image]]
    seen: dict[tuple[str, frozenset[str]], None] = {}
    found: dict[str, Package] = {}
    while waiting:
        requirement = waiting.pop()
        name, chosen = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, chosen) in seen:
            continue
        seen[name, chosen] = None
        if name == project["name"]:
            waiting += [Requirement(text) for extra in chosen for text in extras[extra]]
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            found[name] = Package(name, "", MISSING)
            continue
        found[name] = Package(name, installed.version, license_of(installed))
        waiting += [needed for needed in map(Requirement, installed.requires or ()) if applies(needed, chosen)]
    return [found[name] for name in sorted(found)]


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    """Whether `requirement` is installed on this machine for a package that was asked for with `extras`."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def license_of(package: Distribution) -> str:
    """The SPDX expression where there is one, else the classifiers, else what the author wrote."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [text for text in metadata.get_all("Classifier") or () if text.startswith("License ::")]
    names = [text.rpartition(" :: ")[2] for text in classifiers]
    specific = [name for name in names if name != "OSI Approved"]
    written = str(metadata.get("License") or "").strip()
    first_line = written.splitlines()[0][:MAX_LICENSE_CHARS] if written else ""
    return " AND ".join(specific) or first_line or UNKNOWN


def denied(packages: Sequence[Package], words: Sequence[str]) -> list[Package]:
    """Those whose licence has one of the words, as a word: GPL is not in LGPL."""
    patterns = [re.compile(rf"(?<![A-Za-z]){re.escape(word)}(?![A-Za-z])", re.IGNORECASE) for word in words]
    return [package for package in packages if any(pattern.search(package.license) for pattern in patterns)]


def main() -> int:
    """Print the lists; 1 when a licence is denied."""
    parser = argparse.ArgumentParser(description="The licences of what each image installs.")
    parser.add_argument("image", nargs="*", help=f"one of {', '.join(IMAGES)}; all if not given")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: %(default)s)")
    parser.add_argument("--deny", action="append", default=[], metavar="WORD", help="refuse licences with this word")
    args = parser.parse_args()
    if unknown := set(args.image) - set(IMAGES):
        parser.error(f"image is {', '.join(unknown)}, must be one of {', '.join(IMAGES)}")
    lists = {image: packages_of(image) for image in args.image or IMAGES}
    if args.format == "json":
        print(json.dumps({image: [asdict(package) for package in packages] for image, packages in lists.items()}))
    else:
        for image, packages in lists.items():
            print(f"{image}: {len(packages)} packages")
            for package in packages:
                print(f"  {package.name:<32} {package.version:<18} {package.license}")
    refused = {package for packages in lists.values() for package in denied(packages, args.deny)}
    for package in sorted(refused, key=lambda package: package.name):
        print(f"denied: {package.name} {package.version}: {package.license}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    raise SystemExit(main())
