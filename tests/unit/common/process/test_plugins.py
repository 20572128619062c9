"""Plugins of installed packages run at a process's start; one that fails is named."""

import sys
from pathlib import Path

import pytest

from pagoda_common.errors import ConfigError
from pagoda_common.process.plugins import run_plugins


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two plugins, as pip leaves it."""
    (tmp_path / "plugged.py").write_text(
        "calls = []\ndef first():\n    calls.append('first')\ndef second():\n    calls.append('second')\n"
    )
    write_entry_points(tmp_path, "b = plugged:second\na = plugged:first\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugged", raising=False)
    return tmp_path


def write_entry_points(directory: Path, lines: str) -> None:
    info = directory / "plugged-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pagoda.plugins]\n{lines}")


def test_plugins_run_in_the_order_of_their_names(installed: Path) -> None:
    run_plugins()
    import plugged

    assert plugged.calls == ["first", "second"]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("lost = plugged:third\n", "AttributeError"),
        ("lost = missing_module:run\n", "ModuleNotFoundError"),
    ],
)
def test_a_plugin_that_fails_is_named(installed: Path, lines: str, reason: str) -> None:
    write_entry_points(installed, lines)
    with pytest.raises(ConfigError, match=f"plugin 'lost' .* failed: {reason}"):
        run_plugins()


def test_a_plugin_that_raises_is_named(installed: Path) -> None:
    (installed / "plugged.py").write_text("def run():\n    raise RuntimeError('no licence')\n")
    write_entry_points(installed, "lost = plugged:run\n")
    with pytest.raises(ConfigError, match=r"plugin 'lost' \(plugged:run\) failed: RuntimeError: no licence"):
        run_plugins()
