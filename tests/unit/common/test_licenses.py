"""scripts/licenses.py: which packages an image has, and under which licences."""

import json
import runpy
import sys
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = str(Path(__file__).parents[3] / "scripts" / "licenses.py")
LICENSES = runpy.run_path(SCRIPT)


def package(**fields: list[str]) -> Any:
    """A distribution with these metadata; _ stands for -."""
    metadata = Message()
    for name, values in fields.items():
        for value in values:
            metadata[name.replace("_", "-")] = value
    return SimpleNamespace(metadata=metadata)


def test_each_image_has_what_its_service_imports_and_no_more() -> None:
    images = {name: {found.name for found in LICENSES["packages_of"](name)} for name in LICENSES["IMAGES"]}
    assert images["scheduler"] < images["frontend"]
    assert images["scheduler"] < images["worker"]
    assert "torch" in images["worker"]
    assert "torch" not in images["frontend"]
    assert "starlette" in images["frontend"], "what packages need is there too"
    assert "pagoda" not in images["worker"]


def test_an_expression_goes_before_classifiers_and_these_before_free_text() -> None:
    classifier = "License :: OSI Approved :: MIT License"
    license_of = LICENSES["license_of"]
    assert license_of(package(License_Expression=["Apache-2.0"], Classifier=[classifier])) == "Apache-2.0"
    assert license_of(package(Classifier=["License :: OSI Approved", classifier], License=["x"])) == "MIT License"
    assert license_of(package(License=["Apache 2.0\n\nand pages of text"])) == "Apache 2.0"
    assert license_of(package()) == LICENSES["UNKNOWN"]


def test_words_are_denied_as_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make = LICENSES["Package"]
    packages = [make("a", "1", "GPL-3.0-only"), make("b", "1", "LGPL-2.1"), make("c", "1", "MIT")]
    assert [found.name for found in LICENSES["denied"](packages, ["gpl"])] == ["a"]
    monkeypatch.setattr(sys, "argv", [SCRIPT, "scheduler", "--format=json", "--deny=Apache"])
    assert LICENSES["main"]() == 1
    printed = capsys.readouterr()
    assert list(json.loads(printed.out)) == ["scheduler"]
    assert "denied: grpcio" in printed.err
