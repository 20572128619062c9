"""All projections of many families: what the worker says with an adapter is what peft's merged model says."""

from pathlib import Path

import pytest

from pagoda_common.errors import ModelLoadError
from tests.checkpoints import make_checkpoint
from tests.peft_adapters import base_model, logprobs, make_adapter, merged
from tests.unit.worker.driver import Driver
from tests.unit.worker.lora.peft_check import CONFIG, check, prompt_of

FAMILIES = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "FalconForCausalLM",
    "BloomForCausalLM",
    "Qwen3NextForCausalLM",
    "CohereForCausalLM",
    "StableLmForCausalLM",
    "MptForCausalLM",
    "DeciLMForCausalLM",
    "ExaoneForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
)


LATENT = "DeepseekV3ForCausalLM"


@pytest.mark.parametrize("family", FAMILIES)
def test_all_projections_of_a_family(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / "model")
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter")
    driver = Driver(tmp_path / "model", lora=CONFIG, max_logprobs=-1)
    driver.load_adapter(1, adapter)
    model, base = merged(tmp_path / "model", adapter), base_model(tmp_path / "model")
    check(driver, model, 1)
    check(driver, base, 0)
    prompt = prompt_of(40)
    assert (logprobs(model, prompt) - logprobs(base, prompt)).abs().max() > 0.1


def test_all_projections_of_latent_attention_but_one(tmp_path: Path) -> None:
    """Queries and sums of latents are multiplied with halves of kv_b_proj."""
    make_checkpoint(LATENT, tmp_path / "model")
    modules = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", target_modules=modules)
    driver = Driver(tmp_path / "model", lora=CONFIG, max_logprobs=-1)
    driver.load_adapter(1, adapter)
    check(driver, merged(tmp_path / "model", adapter), 1)
    check(driver, base_model(tmp_path / "model"), 0)
    whole = make_adapter(tmp_path / "model", tmp_path / "whole")
    with pytest.raises(ModelLoadError, match=r"kv_b_proj.* no such matrix that adapters can change"):
        driver.load_adapter(2, whole)
