"""docs/sampling.md has the table of sampling fields as the code has it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from pagoda_common.params.sampling_params import SAMPLING_FIELDS

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "sampling_table.py"
MAX_WORDS = 12


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sampling_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_the_code(script: ModuleType) -> None:
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    assert page == script.with_table(page), "run python scripts/sampling_table.py"


def test_every_field_is_described_in_a_few_words(script: ModuleType) -> None:
    descriptions = script.descriptions()
    assert descriptions.keys() == SAMPLING_FIELDS.keys()
    assert [name for name, text in descriptions.items() if not 2 <= len(text.split()) <= MAX_WORDS] == []


def test_a_row_says_default_bounds_bodies_and_message(script: ModuleType) -> None:
    rows = {line.split("|")[1].strip(): line for line in script.table().splitlines()}
    shown = [cell.strip() for cell in rows["`top_p`"].strip("|").split("|")]
    assert shown[:5] == ["`top_p`", "1 \\*", "in (0, 1]", "all", "yes"]
    shown = [cell.strip() for cell in rows["`extra_args`"].strip("|").split("|")]
    assert shown[:5] == ["`extra_args`", "", "", "all: `vllm_xargs`", "`extra_args_json`"]
    shown = [cell.strip() for cell in rows["`ignore_eos`"].strip("|").split("|")]
    assert shown[:3] == ["`ignore_eos`", "false", ""]


def test_a_page_without_the_marks_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="once each"):
        script.with_table("# Sampling\n")
