"""The program of circumstances finds that one family of its own, and one of transformers, stand all but processes."""

import pytest

from tests.models.circumstances import FAMILIES, run


@pytest.mark.parametrize("family", ["Exaone4ForCausalLM", "apertus"])
def test_a_family_stands_all(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert family in FAMILIES
    assert run(family, has_processes=False) == []
    assert capsys.readouterr().out.count(f"{family}: holds") == 10
