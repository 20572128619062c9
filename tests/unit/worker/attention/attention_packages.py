"""The packages whose kernels may compute attention, as stand-ins, and the layers that they are asked for."""

import importlib.machinery
import importlib.metadata
import sys

import pytest
import torch

from pagoda_kernels.external.adapter import AttentionNeeds, Scoring
from tests.fakes.flash_attn_module import flash_attn_module
from tests.fakes.flashinfer_module import flashinfer_module

NEEDS = AttentionNeeds(
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    layers=(Scoring(0.125), Scoring(0.125, window=4096), Scoring(0.125)),
    capability=(9, 0),
)


def install_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are there."""
    for module in (flashinfer_module(), flash_attn_module()):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.1")
