"""docs/models.md agrees with the registry, and with the transformers that it was written for."""

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagoda_worker.models.registry import FAMILIES, MODEL_TYPES
from tests.models.models_table import PAGE, read_refused, read_rows

ROOT = Path(__file__).parents[3]
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = read_rows(TEXT)
REFUSED = read_refused(TEXT)


def test_what_runs_as_ours_is_a_family() -> None:
    for row in ROWS.values():
        is_ours = row.architecture in FAMILIES and row.model_type in {*MODEL_TYPES, "gpt-sw3"}
        assert (row.implementation == "pagoda") == is_ours, row


def test_every_family_runs() -> None:
    assert set(MODEL_TYPES) <= set(ROWS)


def test_every_type_of_transformers_is_in_one_of_the_tables() -> None:
    assert not set(ROWS) & set(REFUSED)
    missing = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ROWS) - set(REFUSED)
    assert not missing, f"run python -m tests.models.sweep for {sorted(missing)}"


def test_the_page_counts_its_rows() -> None:
    assert f"{len(ROWS)} of {len(ROWS) + len(REFUSED)} types run." in TEXT
    assert f"**{len(ROWS)} model types.**" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(ROWS) >= 100
