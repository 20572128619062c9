"""The distribution: its name, which is not that of the packages to import, and its one version."""

import re
import runpy
import tomllib
from pathlib import Path

from packaging.utils import canonicalize_name

import pagoda
from pagoda_common.version import VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = [path for folder in ("services", "client", "common", "kernels") for path in (ROOT / folder).rglob("*.py")]


def test_the_name_is_ours_on_the_index() -> None:
    assert PROJECT["project"]["name"] == "pagoda-llm"
    assert "pagoda" in PROJECT["project"]["scripts"]


def test_there_is_one_version() -> None:
    found = PROJECT["tool"]["hatch"]["version"]
    match = re.search(found["pattern"], (ROOT / found["path"]).read_text())
    assert match is not None
    assert match["version"] == VERSION == pagoda.__version__
    for file in (ROOT / "services").glob("*/Dockerfile"):
        assert f"ARG VERSION={VERSION}\n" in file.read_text(), file


def test_constraints_have_a_fitting_version_of_every_dependency() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "constraints.py"))
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:]
    versions = dict(line.split("==") for line in lines)
    for requirement in script["wanted"]():
        if requirement.name not in script["LEFT_OUT"]:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_nothing_asks_the_environment_for_a_distribution_of_the_old_name() -> None:
    asked = re.compile(r"""version\(["']pagoda|pagoda\[[a-z]""")
    assert [path for path in SOURCES if asked.search(path.read_text())] == []


def test_extras_that_name_extras_are_resolved_for_images() -> None:
    requirements = runpy.run_path(str(ROOT / "scripts" / "extra_requirements.py"))["requirements"]
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert [line for line in requirements(extra) if line.startswith("pagoda")] == []
    assert set(requirements("scheduler")) < set(requirements("worker"))
