"""The generated parts of the pages are what scripts/docs_pages.py makes today."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "scripts" / "docs_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["migration.md", "settings.md", "http_reference.md", "grpc_reference.md"])
def test_a_page_has_what_the_code_says(script: ModuleType, name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == script.generated(name), "run make docs"


def test_every_page_with_marks_is_generated(script: ModuleType) -> None:
    elsewhere = {"models.md", "sampling.md"}  # the sweep's, and scripts/sampling_table.py's
    marked = {page.name for page in (ROOT / "docs").glob("*.md") if re.search("<!-- .*: begin -->", page.read_text())}
    assert marked - elsewhere == set(script.PARTS)


def test_a_path_has_the_fields_of_its_body(script: ModuleType) -> None:
    text = script.http_calls().split("### POST /v1/completions\n")[1].split("\n### ")[0]
    assert "| `max_tokens` | integer |" in text
    assert "Answers: 200, 400" in text


def test_a_call_and_a_message_have_the_comments_of_the_contracts(script: ModuleType) -> None:
    text = script.grpc_calls()
    assert re.search(r"^\| `Execute` \| stream of \w+ \| stream of \w+ \| \w+", text, re.MULTILINE)
    assert re.search(r"^\| `max_tokens` \| \d+ \| optional uint32 \| \w+", text, re.MULTILINE)


def test_every_flag_of_vllm_is_in_one_list_only(script: ModuleType) -> None:
    taken, table = script.flags().split("\n\n")
    names = set(re.findall(r"`(--[\w.-]+)`", taken))
    others = re.findall(r"^\| `(--[\w.-]+)` \|", table, re.MULTILINE)
    assert "--max-model-len" in names
    assert "--pipeline-parallel-size" in others
    assert not names & set(others)
    assert len(others) == len(set(others))


def test_a_page_without_the_marks_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="once each"):
        script.with_part("# Page\n", "flags", "text")
