"""A model with a mixture: its kernel gives what one expert after the other gives, and lets go of weights that leave."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.native.library import load_native, native
from pagoda_worker.models.feed_forward import MixtureOfExperts
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import make_prompts

load_native()
pytestmark = pytest.mark.skipif(native("mixture_of_experts") is None, reason="this CPU has no AVX512-BF16")

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
ARCHITECTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")


def mixtures(driver: Driver) -> list[MixtureOfExperts]:
    model = driver.worker._model
    assert model is not None
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def prompt_logprobs(driver: Driver) -> list[float]:
    sequences = driver.generate(make_prompts((70, 3)), PARAMS)
    return [float(x) for one in sequences for chunk in one.prompt_logprobs for x in chunk.logprobs.logprobs]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_gives_what_one_expert_after_the_other_gives(
    architecture: str, quantization: str | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    directory = make_checkpoint(architecture, tmp_path)
    ours = prompt_logprobs(Driver(directory, **options))
    plain = Driver(directory, reference_kernels=("mixture_of_experts", "decoder_layers"), **options)
    theirs = prompt_logprobs(plain)
    assert all(module._kernel is None for module in mixtures(plain))
    differences = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    assert sum(differences) / len(differences) < (
        0.02 if quantization is None else 0.08
    )  # sums are rounded once, not twice


def test_a_layer_that_is_not_fused_has_a_kernel_of_its_own(tmp_path: Path) -> None:
    driver = Driver(make_checkpoint("OlmoeForCausalLM", tmp_path), dtype="bfloat16")
    prompt_logprobs(driver)
    assert all(module._kernel is not None for module in mixtures(driver))


def test_weights_that_leave_the_device_are_held_by_no_kernel(tmp_path: Path) -> None:
    driver = Driver(make_checkpoint("OlmoeForCausalLM", tmp_path), dtype="bfloat16")
    before = prompt_logprobs(driver)
    weight = weakref.ref(mixtures(driver)[0].experts[0].down_proj.weight)
    driver.worker.sleep(1)
    gc.collect()
    assert weight() is None
    driver.worker.wake_up()
    driver.worker.initialize_cache(num_blocks=600, num_cpu_blocks=4)
    assert prompt_logprobs(driver) == before
