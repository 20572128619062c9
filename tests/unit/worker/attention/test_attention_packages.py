"""Steps whose attention another package computes give what our kernels give."""

import sys
from typing import Any

import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.external.adapter import Adapter
from pagoda_kernels.external.flash_attn import FlashAttention
from pagoda_kernels.external.flashinfer import FlashInferAttention
from pagoda_worker.attention.choice import AttentionChoice
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.worker import Worker
from tests.unit.worker.attention.attention_packages import NEEDS, install_packages
from tests.unit.worker.driver import Driver, Tracked
from tests.unit.worker.steps.step_scripts import (
    BLOCK_SIZE,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    Script,
    run_ahead,
    run_one_by_one,
    told,
)

CPU = torch.device("cpu")
PROMPTS = [list(range(5, 6)), list(range(20, 57)), list(range(100, 117))]
GREEDY = SamplingParams(temperature=0.0)
PARAMS = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
OPERATION_BY_OPERATION = ("decoder_layers", "composed_layers", "paged_attention")
"""Kernels to do without: a model then computes as on a GPU."""


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    install_packages(monkeypatch)


def generate(attention: AttentionChoice | None) -> list[Tracked]:
    """Prompts in chunks beside decodes, with the layers one after the other, as on a GPU."""
    driver = Driver("pagoda-tiny", reference_kernels=OPERATION_BY_OPERATION, max_num_seqs=4, num_blocks=40)
    loaded = driver.worker._loaded_model()
    driver.worker._runner = ModelRunner(
        model=loaded.model,
        kv_cache=loaded.make_cache(num_blocks=40),
        max_num_seqs=4,
        max_model_len=loaded.max_model_len,
        dtype=loaded.dtype,
        device=loaded.device,
        attention=attention,
    )
    assert driver.worker._runner.forward.fused is None
    return driver.generate(PROMPTS, PARAMS, max_tokens=5, chunk=20)


def assert_alike(actual: list[Tracked], expected: list[Tracked]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.output == other.output
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("adapter_type", [FlashInferAttention, FlashAttention])
def test_a_model_gives_the_same_tokens_with_another_package(adapter_type: type[Adapter]) -> None:
    adapter = adapter_type(needs=NEEDS, device=CPU)
    assert_alike(generate(AttentionChoice({adapter.name: adapter})), generate(None))
    if adapter_type is FlashInferAttention:
        num_plans = sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper.num_plans
        assert num_plans == 6, "one for each step: the second prompt's last token comes a step later"


@pytest.mark.parametrize("adapter_type", [FlashInferAttention, FlashAttention])
def test_steps_that_run_ahead_have_plans_of_their_own(adapter_type: type[Adapter]) -> None:
    script = Script(3, [GREEDY], joins=0.5, chunks=True).add(40)

    def worker(*, overlaps: bool) -> Worker:
        made = Worker(num_threads=1, overlaps=overlaps)
        sizes = {"block_size": BLOCK_SIZE, "max_num_seqs": MAX_NUM_SEQS, "num_blocks": NUM_BLOCKS}
        Driver("pagoda-tiny", worker=made, reference_kernels=OPERATION_BY_OPERATION, **sizes)  # type: ignore[arg-type]  # as named
        return made

    expected = [told(output) for output in run_one_by_one(worker(overlaps=False), script.steps)]
    ahead, adapter = worker(overlaps=True), adapter_type(needs=NEEDS, device=CPU)
    ahead._attention = AttentionChoice({adapter.name: adapter})
    ahead.initialize_cache(num_blocks=NUM_BLOCKS, num_cpu_blocks=0)
    outputs, num_ahead = run_ahead(ahead, script.steps)
    assert [told(output) for output in outputs] == expected
    assert num_ahead > 30
    assert script.num_mixed > 5


class FailsLater(FlashInferAttention):
    """Serves a few layers, and no more."""

    num_left = 3

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")
        return super().__call__(*args, **options)


def test_who_fails_in_a_step_is_replaced_at_once_and_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    adapter = FailsLater(needs=NEEDS, device=CPU)
    choice = AttentionChoice({"flashinfer": adapter})
    assert_alike(generate(choice), generate(None))
    assert (adapter.num_left, choice.names) == (-1, [])
    assert caplog.text.count("flashinfer does not compute attention, our kernels do: it failed in a step: ") == 1
