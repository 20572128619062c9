"""The GPU benchmarks check and measure other packages' attention where these are installed."""

import importlib.machinery
import importlib.metadata
import sys

import pytest
import torch

from benchmarks.gpu.backends import backend_checks, measure_backends
from benchmarks.gpu.tools.timing import Figures
from tests.fakes.flash_attn_module import flash_attn_module
from tests.fakes.flashinfer_module import flashinfer_module

CPU = torch.device("cpu")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flashinfer_module(), flash_attn_module()):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.1")


def test_installed_packages_are_checked_and_have_rows_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    checks = list(backend_checks(CPU, torch.bfloat16, 64, 2))
    assert [check.case.split()[:2] for check in checks] == [
        [name, case] for name in ("flashinfer", "flash_attn") for case in ("plain", "window", "softcap")
    ]
    assert all(pair.error <= 1 for check in checks for pair in check.run())
    assert list(backend_checks(CPU, torch.float32, 64, 2)) == []
    figures = Figures(CPU)
    measure_backends(figures, is_small=True)
    assert [(row["part"], row["case"]) for row in figures.rows] == [
        (f"{part} {name}", f"{case}{again}")
        for name in ("flashinfer", "flash_attn")
        for part, case in (("decode", "batch 2, 40 keys"), ("prefill", "40 tokens"))
        for again in ("", ", planned again")
    ]
    assert sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper.num_plans > 3 + 2 * 4


def test_without_them_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    figures = Figures(CPU)
    measure_backends(figures, is_small=True)
    assert figures.rows == []
