"""Every key of config.json changes the options of a model that config_effects.txt says, and no others."""

import pytest

from tests.checkpoints import ARCHITECTURES
from tests.unit.worker.models.config_effects import PATH, effects

EXPECTED: dict[str, set[str]] = {}
for _line in PATH.read_text().splitlines():
    _effect, _, _names = _line.rpartition(" | ")
    for _name in _names.split():
        EXPECTED.setdefault(_name, set()).add(_effect)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_key_changes_what_it_means(architecture: str) -> None:
    found = set(effects(architecture))
    changed = sorted(found ^ EXPECTED.get(architecture, set()))
    assert not changed, "python -m tests.unit.worker.models.config_effects writes the file again"
