"""Encoders in bfloat16: how their matrices are held, and that their vectors stay those of float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_kernels.native.library import load_native, native
from pagoda_worker.models.encoders.hosted_activation import HostedActivation
from pagoda_worker.models.encoders.hosted_norm import HostedLayerNorm
from pagoda_worker.models.linear_method import PACKED, PLAIN, WIDENED
from pagoda_worker.models.transformers_model.hosted_layers import HostedLinear
from tests.encoders import hidden_of, make_encoder, prompts_of, write_modules
from tests.unit.worker.pooling.driver import PoolingDriver

load_native()
LENGTHS = (1, 2, 17, 100, 64)


@pytest.mark.parametrize("family", ["BertModel", "ModernBertModel", "NomicBertModel", "Qwen3Model"])
def test_bfloat16_is_close_to_float32(family: str, tmp_path: Path) -> None:
    model = make_encoder(family, tmp_path)
    write_modules(tmp_path, "mean_tokens")
    prompts = prompts_of(LENGTHS)
    driver = PoolingDriver(tmp_path, dtype="bfloat16")
    for prompt, made in zip(prompts, driver.pool(prompts), strict=True):
        mean = hidden_of(model, prompt).mean(0)
        assert float(torch.tensor(made) @ mean / mean.norm()) > 0.999


@pytest.mark.skipif(native("packed_linear") is not None, reason="this CPU has instructions for bfloat16")
def test_matrices_are_wide_where_bfloat16_is_slow(tmp_path: Path) -> None:
    make_encoder("BertModel", tmp_path)
    for dtype, method in (("bfloat16", WIDENED), ("float32", PLAIN)):
        modules = list(PoolingDriver(tmp_path, dtype=dtype).worker._model.modules())
        linears = [module for module in modules if isinstance(module, HostedLinear)]
        assert linears
        assert all(one.method is method and one.weight.dtype == torch.float32 for one in linears)
        assert any(isinstance(module, HostedActivation) for module in modules)


@pytest.mark.skipif(native("compressed_linear") is None, reason="this CPU has no instructions for bfloat16")
def test_matrices_are_not_compressed(tmp_path: Path) -> None:
    """Many rows share the reading of a matrix."""
    make_encoder("BertModel", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    few = {name: value.sign() / 8 if value.dim() > 1 else value for name, value in tensors.items()}
    save_file(few, tmp_path / "model.safetensors", metadata={"format": "pt"})
    modules = list(PoolingDriver(tmp_path, dtype="bfloat16").worker._model.modules())
    assert {one.method for one in modules if isinstance(one, HostedLinear)} == {PACKED}


def test_a_wide_matrix_is_multiplied_in_float32_and_rounded_once() -> None:
    layer = HostedLinear(in_features=40, out_features=24, bias=True, prefix="x")
    layer.dtype = torch.bfloat16
    layer.weight = torch.nn.Parameter(torch.randn(24, 40).bfloat16(), requires_grad=False)
    layer.bias = torch.nn.Parameter(torch.randn(24).bfloat16(), requires_grad=False)
    weight, bias = layer.weight.double(), layer.bias.double()
    layer.method = WIDENED
    WIDENED.process_weights_after_loading(layer)
    x, residual = torch.randn(7, 40).bfloat16(), torch.randn(7, 24).bfloat16()
    wanted = (x.double() @ weight.T + bias + residual.double()).bfloat16()
    made = WIDENED.apply(layer, x, bias=layer.bias, residual=residual)
    np.testing.assert_allclose(made.float().numpy(), wanted.float().numpy(), rtol=0.008, atol=1e-3)
    assert torch.equal(WIDENED.embedding(layer, torch.tensor([3, 5])).double(), weight[[3, 5]])


def test_projections_add_the_residual_before_a_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_encoder("BertModel", tmp_path)
    driver = PoolingDriver(tmp_path)
    residuals = []
    multiply = HostedLinear.multiply

    def recorded(self: HostedLinear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        residuals.append(residual is not None)
        return multiply(self, x, residual)

    monkeypatch.setattr(HostedLinear, "multiply", recorded)
    (prompt,) = prompts_of([9])
    (made,) = driver.pool([prompt])
    assert residuals == [False, False, False, True, False, True] * 3  # query, key, value, output; up, down
    first = hidden_of(model, prompt)[0]
    np.testing.assert_allclose(made, (first / first.norm()).numpy(), atol=1e-5)
    modules = list(driver.worker._model.modules())
    assert not [one for one in modules if type(one) is torch.nn.LayerNorm]
    assert any(isinstance(one, HostedLayerNorm) for one in modules)


def test_modules_with_the_same_parts_keep_what_they_do(tmp_path: Path) -> None:
    """X-MOD's norm is not over a sum."""
    model = make_encoder("XmodModel", tmp_path, languages=["en_XX"], default_language="en_XX")
    (prompt,) = prompts_of([40])
    (made,) = PoolingDriver(tmp_path).pool([prompt])
    first = hidden_of(model, prompt)[0]
    np.testing.assert_allclose(made, (first / first.norm()).numpy(), atol=1e-5)
