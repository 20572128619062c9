"""A model on Triton kernels keeps experts in FP8 and MXFP4 as they are stored, and gives the tokens of their floats."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels import selection
from pagoda_worker.models.scaled_method import ScaledLinearMethod
from tests.checkpoints import make_checkpoint
from tests.kernels.triton.test_model import assert_same, used_kernels
from tests.unit.worker.driver import Driver, Tracked
from tests.unit.worker.quantization.scaled_checkpoints import Scheme, compressed, write_mxfp4, write_scaled

OTHERS = (
    "act_and_mul",
    "add_rms_norm",
    "paged_attention",
    "rms_norm",
    "rope_store",
    "sample_tokens",
    "store_kv_cache",
    "top_logprobs",
)
"""Kernels that other tests are about."""
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": compressed("float", "channel")},
}
FLOAT8 = {
    "blocks": Scheme(
        config={"quant_method": "fp8", "weight_block_size": [48, 64]}, rows=48, columns=64, scale="weight_scale_inv"
    ),
    "channels": Scheme(config=CHANNELS, rows=1),
    "tensor": Scheme(config={"quant_method": "fp8"}, is_flat=True),
}
"""Blocks that end inside of what a rank holds, and where gate and up meet."""


@pytest.fixture(autouse=True)
def one_launch_at_a_time(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and Triton's interpreter is of one thread."""
    from triton.runtime.interpreter import GridExecutor

    lock, launch = Lock(), GridExecutor.__call__

    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", locked)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Within: what a CPU does."""
    selection._takes_cpu_tensors = False
    try:
        yield
    finally:
        selection._takes_cpu_tensors = True


def generate(driver: Driver) -> list[Tracked]:
    prompts = [list(range(5, 6)), list(range(20, 37))]
    return driver.generate(prompts, SamplingParams(temperature=0.0, logprobs=3), max_tokens=3)


def experts(driver: Driver) -> list[Any]:
    """Layers of all ranks that hold a matrix of an expert."""
    workers = getattr(driver.worker, "workers", [driver.worker])
    modules = [module for worker in workers for module in worker._model.modules()]
    return [module for module in modules if getattr(module, "is_of_experts", False)]


def assert_kept(
    packed: Path, floats: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    with torch.inference_mode():
        driver = Driver(packed, reference_kernels=OTHERS, **options)
        used = used_kernels(monkeypatch)
        actual = generate(driver)
        assert "grouped_linear" in used
        layers = experts(driver)
        assert layers
        assert all(isinstance(layer.method, ScaledLinearMethod) and layer.weight.dtype == dtype for layer in layers)
        with without_kernels():
            expected = generate(Driver(floats, reference_kernels=OTHERS))
    assert_same(actual, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_mxfp4_stays(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats, packed = write_mxfp4(tmp_path)
    assert_kept(packed, floats, torch.uint8, monkeypatch, world_size=world_size)


@pytest.mark.parametrize(
    ("name", "world_size"), [("blocks", 1), ("blocks", 2), ("channels", 1), ("channels", 2), ("tensor", 1)]
)
def test_float8_stays(name: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint("Qwen3MoeForCausalLM", tmp_path / "source", moe_intermediate_size=192, num_hidden_layers=2)
    packed, floats, scheme = tmp_path / "packed", tmp_path / "floats", FLOAT8[name]
    write_scaled(source, packed, floats, lambda _: scheme, scheme.config)
    assert_kept(packed, floats, torch.float8_e4m3fn, monkeypatch, world_size=world_size)


def test_what_no_kernel_reads_becomes_floats(tmp_path: Path) -> None:
    """Also integers that were asked for, and everything on a CPU."""
    source = make_checkpoint("Qwen3MoeForCausalLM", tmp_path / "source", num_hidden_layers=2)
    odd = {"quant_method": "fp8", "weight_block_size": [24, 24]}
    scheme = Scheme(config=odd, rows=24, columns=24, scale="weight_scale_inv")
    write_scaled(source, tmp_path / "packed", tmp_path / "floats", lambda _: scheme, odd)
    assert not any(isinstance(layer.method, ScaledLinearMethod) for layer in experts(Driver(tmp_path / "packed")))
    _, packed = write_mxfp4(tmp_path)
    online = experts(Driver(packed, quantization="int8"))
    with without_kernels():
        on_cpu = experts(Driver(packed))
    assert not any(isinstance(layer.method, ScaledLinearMethod) for layer in [*online, *on_cpu])
