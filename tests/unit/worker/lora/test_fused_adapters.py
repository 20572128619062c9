"""Adapters in the one call of all layers: the bits of the layers one by one, and of each adapter alone."""

from pathlib import Path
from typing import Any

import pytest

from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.decoder.decoder_layers import DecoderLayers, set_num_helpers
from pagoda_kernels.native.library import load_native, native
from pagoda_worker.steps.forward_pass import ForwardPass
from tests.checkpoints import make_checkpoint
from tests.peft_adapters import make_adapter
from tests.unit.worker.driver import Driver, Tracked
from tests.unit.worker.models.reference import make_prompts

load_native()
pytestmark = pytest.mark.skipif(native("decoder_layers") is None, reason="this CPU has no AVX512-BF16")

CONFIG = LoraConfig(enable_lora=True, max_loras=8, max_lora_rank=64)
LENGTHS = (1, 15, 40, 17, 70, 33)
NUMBERS = [0, 1, 2, 3, 1, 2]
PARAMS = (
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"r": 8, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    {"r": 33, "target_modules": ["gate_proj", "down_proj", "k_proj"]},
    {"r": 16, "target_modules": "all-linear"},
)


def pass_of(driver: Driver) -> ForwardPass:
    assert driver.worker._runner is not None
    return driver.worker._runner.forward


def drivers(directory: Path, adapters: list[Path], **options: Any) -> tuple[Driver, Driver]:
    """One with all layers in a call, and one without."""
    both = tuple(Driver(directory, dtype="bfloat16", lora=CONFIG, **options) for _ in range(2))
    for driver in both:
        for number, adapter in enumerate(adapters, start=1):
            driver.load_adapter(number, adapter)
    assert isinstance(pass_of(both[0]).fused, DecoderLayers)
    pass_of(both[1]).fused = None
    return both[0], both[1]


def said(sequences: list[Tracked]) -> list[Any]:
    return [(one.output, one.logprobs) for one in sequences]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("MistralForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("LlamaForCausalLM", {"quantization": "int8"}),
        ("LlamaForCausalLM", {"quantization": "int4"}),
    ],
    ids=str,
)
def test_steps_with_adapters_are_one_call(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    directory = make_checkpoint(family, tmp_path / "model")
    adapters = [make_adapter(directory, tmp_path / str(seed), seed=seed, **given) for seed, given in enumerate(OPTIONS)]
    fused, plain = drivers(directory, adapters, **options)
    prompts = make_prompts(LENGTHS)
    for params in PARAMS:
        ours, theirs = (said(one.generate(prompts, params, chunk=20, loras=NUMBERS)) for one in (fused, plain))
        assert ours == theirs
        assert pass_of(fused)._places is not None
    alone = [
        fused.generate([prompt], PARAMS[0], loras=[number])[0].output
        for prompt, number in zip(prompts, NUMBERS, strict=True)
    ]
    together = [one.output for one in fused.generate(prompts, PARAMS[0], loras=NUMBERS)]
    base = [one.output for one in fused.generate(prompts, PARAMS[0])]
    assert together == alone
    assert together[0] == base[0]
    assert sum(one != other for one, other in zip(together, base, strict=True)) >= 3


def test_adapters_of_tables_and_heads_leave_layers_in_one_call(tmp_path: Path) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    adapter = make_adapter(directory, tmp_path / "a", target_modules=["embed_tokens", "lm_head", "q_proj"])
    fused, plain = drivers(directory, [adapter])
    prompts = make_prompts(LENGTHS)
    loras = [1, 0, 1, 1, 0, 0]
    ours, theirs = (said(one.generate(prompts, PARAMS[1], chunk=20, loras=loras)) for one in (fused, plain))
    assert ours == theirs
    assert pass_of(fused)._changes_ends
    assert pass_of(fused)._places is not None


def test_experts_with_adapters_are_computed_layer_by_layer(tmp_path: Path) -> None:
    directory = make_checkpoint("Qwen3MoeForCausalLM", tmp_path / "model")
    options: dict[str, Any] = {"target_parameters": ["mlp.experts.gate_up_proj"]}
    adapters = [
        make_adapter(directory, tmp_path / "0", target_modules=["q_proj"], **options),
        make_adapter(directory, tmp_path / "1", target_modules=["q_proj", "o_proj"]),
    ]
    fused, plain = drivers(directory, adapters)
    prompts = make_prompts(LENGTHS)
    for loras, is_one_call in (([2, 0, 2, 2, 0, 2], True), ([2, 0, 1, 2, 1, 0], False)):
        ours, theirs = (said(one.generate(prompts, PARAMS[0], chunk=20, loras=loras)) for one in (fused, plain))
        assert ours == theirs
        assert (pass_of(fused)._places is not None) == is_one_call


def test_helpers_change_no_bit(tmp_path: Path) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    adapters = [make_adapter(directory, tmp_path / str(seed), seed=seed) for seed in range(3)]
    fused, _ = drivers(directory, adapters)
    prompts = make_prompts(LENGTHS)
    expected = said(fused.generate(prompts, PARAMS[1], loras=NUMBERS))
    set_num_helpers(1)
    try:
        assert said(fused.generate(prompts, PARAMS[1], loras=NUMBERS)) == expected
    finally:
        set_num_helpers(0)
