"""The columns of docs/models.md that say what works with ranks, LoRA and integers are what a model shows."""

from pathlib import Path

import pytest

from tests.models.abilities import Abilities, abilities_of
from tests.models.models_table import PAGE, read_rows
from tests.models.sweep import make_model

EXPECTED = {
    "llama": Abilities("yes", "yes", "yes"),
    "gpt2": Abilities("yes", "yes", "yes"),
    "llama4_text": Abilities("yes", "yes", "yes"),
    "granitemoehybrid": Abilities("yes", "yes", "yes"),
    "minicpm3": Abilities("yes", "not kv_b_proj", "not kv_b_proj"),
}
ROWS = read_rows(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("model_type", EXPECTED)
def test_abilities_are_seen(model_type: str, tmp_path: Path) -> None:
    assert abilities_of(tmp_path, make_model(model_type, tmp_path)) == EXPECTED[model_type]


@pytest.mark.parametrize(
    "model_type", [*EXPECTED, "helium", "granitemoe", "minimax_m2", "deepseek_v3", "gpt_oss", "nemotron-nas"]
)
def test_the_page_says_what_is_seen(model_type: str, tmp_path: Path) -> None:
    row = ROWS[model_type]
    seen = abilities_of(tmp_path, make_model(model_type, tmp_path))
    assert Abilities(row.ranks, row.adapters, row.integers) == seen, "run python -m tests.models.models_table"
