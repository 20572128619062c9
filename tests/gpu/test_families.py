"""Every family on a CUDA device in float32 against transformers on the CPU, adapters against peft, encoders."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.encoders import DECODERS, FAMILIES, hidden_of, make_encoder, prompts_of
from tests.peft_adapters import base_model, make_adapter, merged
from tests.unit.worker.driver import Driver
from tests.unit.worker.lora.peft_check import CONFIG, check
from tests.unit.worker.models.reference import NUM_TOKENS, Reference, make_prompts, open_reference
from tests.unit.worker.pooling.driver import PoolingDriver

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CLOSE = 1e-3
"""Between log probabilities in float32, whose sums another device adds in another order."""
SPECULATED = (
    *("LlamaForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM", "FalconH1ForCausalLM"),
    "DeepseekV3ForCausalLM",
)
ADAPTED = ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "Qwen3NextForCausalLM")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return open_reference(tmp_path_factory.mktemp("checkpoint"), request.param, device="cuda")


def outputs_of(driver: Driver, **options: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, ignore_eos=True)
    sequences = driver.generate(make_prompts(), params, max_tokens=NUM_TOKENS, **options)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize(("chunk", "budget"), [(10_000, 10_000), (16, 40)])
def test_greedy_tokens_equal_transformers(reference: Reference, chunk: int, budget: int) -> None:
    assert outputs_of(reference.driver, chunk=chunk, budget=budget) == reference.outputs


def test_logprobs_equal_transformers(reference: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    for sequence in reference.driver.generate(make_prompts(), params, max_tokens=8, chunk=100):
        expected = reference.logprobs(sequence.prompt + sequence.output)
        for index, entries in enumerate(sequence.logprobs):
            row = expected[len(sequence.prompt) + index - 1]
            assert list(entries.values()) == pytest.approx([float(row[token]) for token in entries], abs=CLOSE)


@pytest.mark.parametrize("architecture", SPECULATED)
def test_drafts_change_no_token(architecture: str, tmp_path: Path) -> None:
    reference = open_reference(tmp_path, architecture)
    drafts = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)
    driver = Driver(tmp_path, device="cuda", speculative=drafts)
    assert outputs_of(driver, chunk=50) == reference.outputs
    assert driver.num_draft_tokens > 0


@pytest.mark.parametrize("architecture", ADAPTED)
def test_adapters_equal_peft(architecture: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(architecture, tmp_path / "model")
    adapter = make_adapter(checkpoint, tmp_path / "adapter")
    driver = Driver(checkpoint, lora=CONFIG, max_logprobs=-1, device="cuda")
    driver.load_adapter(1, adapter)
    check(driver, merged(checkpoint, adapter), 1, tolerance=CLOSE)
    check(driver, base_model(checkpoint), 0, tolerance=CLOSE)


@pytest.mark.parametrize("architecture", [*FAMILIES, *DECODERS])
def test_hidden_states_of_encoders_equal_transformers(architecture: str, tmp_path: Path) -> None:
    model = make_encoder(architecture, tmp_path)
    driver = PoolingDriver(tmp_path, runner="pooling", device="cuda")
    prompts = prompts_of((1, 2, 17, 511, 17, 64, 3))
    params = [PoolingParams(task="token_embed", normalize=False)] * len(prompts)
    for prompt, made in zip(prompts, driver.pool(prompts, params), strict=True):
        np.testing.assert_allclose(made, hidden_of(model, prompt).numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "NemotronHForCausalLM"])
def test_quantized_weights_say_the_same_on_both_devices(architecture: str, quantization: str, tmp_path: Path) -> None:
    make_checkpoint(architecture, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)
    found = [
        Driver(tmp_path, quantization=quantization, device=device).generate(make_prompts(), params, max_tokens=1)
        for device in ("cpu", "cuda")
    ]
    for one, other in zip(*found, strict=True):
        assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.02)
