"""What a launch knows of its device, and tiles that fit it."""

from types import SimpleNamespace

import pytest
import torch

from pagoda_kernels.triton.grouped_linear import SCALED_TILES, TILES, Tile, _fitting_tile
from pagoda_kernels.triton.launch import max_shared_bytes, num_multiprocessors


def test_without_a_device_the_smallest_of_gpus_counts() -> None:
    assert max_shared_bytes(torch.device("cpu")) == 99 * 1024
    assert num_multiprocessors(torch.device("cpu")) == 1


def test_a_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 3)
    known = SimpleNamespace(
        multi_processor_count=132, shared_memory_per_block=48 * 1024, shared_memory_per_block_optin=227 * 1024
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", {device: known}.__getitem__)
    assert max_shared_bytes.__wrapped__(device) == 227 * 1024
    assert num_multiprocessors.__wrapped__(device) == 132


@pytest.mark.parametrize("max_bytes", [227 * 1024, 99 * 1024, 48 * 1024])
@pytest.mark.parametrize("x_bytes", [2, 4])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_every_tile_is_made_to_fit(is_scaled: bool, x_bytes: int, max_bytes: int) -> None:
    weight_bytes = 1 if is_scaled else x_bytes
    for block_rows, tile in (SCALED_TILES if is_scaled else TILES).items():
        made = _fitting_tile(tile, block_rows, x_bytes, weight_bytes, max_bytes)
        needed = (block_rows * x_bytes + made.outputs * weight_bytes) * made.inputs * made.num_stages
        assert needed <= max_bytes
        assert made.num_warps == tile.num_warps
        assert made == tile or 2 * needed > max_bytes, "no smaller than it has to be"


def test_a_tile_loses_inputs_first_then_a_stage_then_outputs() -> None:
    tile = Tile(outputs=128, inputs=128, num_warps=4, num_stages=3)
    whole = (16 + 128) * 2 * 128 * 3
    assert _fitting_tile(tile, 16, 2, 2, whole) == tile
    assert _fitting_tile(tile, 16, 2, 2, whole - 1) == tile._replace(inputs=64)
    assert _fitting_tile(tile, 16, 2, 2, whole // 4) == tile._replace(inputs=32)
    assert _fitting_tile(tile, 16, 2, 2, whole // 4 - 1) == tile._replace(inputs=32, num_stages=2)
    assert _fitting_tile(tile, 16, 2, 2, whole // 6 - 1) == tile._replace(outputs=64, inputs=32, num_stages=2)
