"""What a project that one can join has: its files, and a public workflow that runs what .ci/run runs."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "name",
    [
        *("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "LICENSE", "constraints.txt"),
        *(".pre-commit-config.yaml", ".clang-format", ".editorconfig", ".github/pull_request_template.md"),
        *(f".github/ISSUE_TEMPLATE/{form}.yml" for form in ("bug", "feature", "model")),
    ],
)
def test_a_file_is_there(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8").strip()


def test_the_public_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert ".ci/run" in [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    targets = re.findall(r"\bmake ([\w-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert {"test", "test-containers", "lint", "docs"} <= set(targets)


def test_the_site_is_built_strictly() -> None:
    assert "\nstrict: true\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_changelog_has_todays_version() -> None:
    version = re.search(r'VERSION = "([\d.]+)"', (ROOT / "common/pagoda_common/version.py").read_text(encoding="utf-8"))
    assert version is not None
    assert f"\n## {version[1]}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (ROOT / "tests" / "compat" / f"v{version[1]}.binpb").is_file()
