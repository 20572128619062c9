"""Attention of the packages that are installed, on a CUDA device: our log probabilities, and nothing waits.

No machine that these tests have run on so far had one of the packages.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.external.adapter import Adapter
from pagoda_kernels.external.adapters import installed_adapters
from pagoda_kernels.external.flash_attn import CAPABILITY, FlashAttention
from pagoda_worker.worker import Worker
from tests.gpu.test_steps import no_wait_goes_unseen
from tests.kernels.triton.test_model import CONFIG
from tests.unit.worker.driver import Driver, Tracked

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [list(range(start, start + 3 + 7 * start % 60)) for start in range(10, 21)]
PARAMS = SamplingParams(temperature=0.0, logprobs=5, ignore_eos=True)


def generate(directory: Path, backend: str, *, watched: bool = False, **model: Any) -> tuple[list[Tracked], list[str]]:
    """Outputs of chunks beside decodes without graphs, and who was there to compute them besides ours."""
    (directory / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 64, "torch_dtype": "bfloat16"} | model))
    driver = Driver(
        directory,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        enforce_eager=True,
        attention_backend=backend,
    )
    assert isinstance(driver.worker, Worker)
    sequences = driver.generate(PROMPTS, PARAMS, max_tokens=12, chunk=20)
    if watched:  # the first time, kernels are compiled
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        with no_wait_goes_unseen():
            driver.generate(PROMPTS, params, max_tokens=12, chunk=20)
    assert driver.worker._attention is not None
    return sequences, driver.worker._attention.names


@pytest.mark.parametrize("adapter", installed_adapters(), ids=lambda adapter: str(adapter.name))
@pytest.mark.parametrize("window", [None, 17])
def test_log_probabilities_are_those_of_our_kernel(adapter: type[Adapter], window: int | None, tmp_path: Path) -> None:
    if adapter is FlashAttention and torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("another device than it is made for")
    model = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    actual, names = generate(tmp_path, adapter.name, watched=True, **model)
    assert names == [adapter.name], "it serves such heads on this device"
    expected, _ = generate(tmp_path, "triton", **model)
    for one, other in zip(actual, expected, strict=True):
        # Up to the first token that rounding has decided otherwise, what was likely is as likely.
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            shared = mine.keys() & theirs.keys()
            assert {token: mine[token] for token in shared} == pytest.approx(
                {token: theirs[token] for token in shared}, abs=0.1
            )
            if mine.keys() != theirs.keys():
                break


def test_the_fastest_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, names = generate(tmp_path, "auto")
    tables = sorted((tmp_path / "cache").rglob("attention/*.json"))
    assert len(tables) <= 1, "none, where no package serves such heads"
    stamps = [path.stat().st_mtime_ns for path in tables]
    again, same = generate(tmp_path, "auto")
    assert (same, [path.stat().st_mtime_ns for path in tables]) == (names, stamps)
    assert [one.output for one in again] == [one.output for one in first]
