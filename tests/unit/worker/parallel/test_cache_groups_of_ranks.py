"""Two ranks give transformers' tokens where layers keep different things of a sequence."""

from pathlib import Path

import pytest

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import NUM_TOKENS, make_prompts, open_reference

ARCHITECTURES = (
    "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Gemma3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "BambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "FalconH1ForCausalLM",
    "NemotronHForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "MiniCPM3ForCausalLM",
    "YoutuForCausalLM",
    "Llama4ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "JambaForCausalLM",
    "DeciLMForCausalLM",
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_equal_transformers(architecture: str, tmp_path: Path) -> None:
    reference = open_reference(tmp_path, architecture, world_size=2)
    sequences = reference.driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=100)
    assert [sequence.output for sequence in sequences] == reference.outputs
    drafts = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)
    with_drafts = Driver(tmp_path, world_size=2, speculative=drafts)
    sequences = with_drafts.generate(make_prompts(), max_tokens=NUM_TOKENS)
    assert [sequence.output for sequence in sequences] == reference.outputs
    assert with_drafts.num_draft_tokens > 0


def test_ranks_that_do_not_divide_the_key_heads_are_refused(tmp_path: Path) -> None:
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    directory = make_checkpoint("Qwen3NextForCausalLM", tmp_path, **sizes)
    with pytest.raises(ConfigError, match="must divide linear_num_key_heads, 1"):
        Driver(directory, world_size=2)


def test_layers_that_share_attention_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be 1 for Zamba2ForCausalLM: its layers share attention"):
        Driver(make_checkpoint("Zamba2ForCausalLM", tmp_path), world_size=2)


def test_falcon_h1_without_a_norm_and_with_one_after_the_gate(tmp_path: Path) -> None:
    """One group of B and C is on both ranks, and its norm is over the values of both."""
    for number, options in enumerate(({"mamba_rms_norm": False}, {"mamba_norm_before_gate": False})):
        sizes = options | {"mamba_n_groups": 1}
        reference = open_reference(tmp_path / str(number), "FalconH1ForCausalLM", world_size=2, **sizes)
        sequences = reference.driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=100)
        assert [sequence.output for sequence in sequences] == reference.outputs


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("BambaForCausalLM", {"mamba_n_heads": 3, "mamba_d_head": 32, "mamba_n_groups": 1}, "Mamba heads, 3"),
        ("BambaForCausalLM", {"mamba_n_groups": 3}, "Mamba groups, 3"),
        ("MambaForCausalLM", {"hidden_size": 45, "expand": 1}, "Mamba channels, 45"),
    ],
)
def test_ranks_that_do_not_divide_a_mamba_layer_are_refused(
    architecture: str, options: dict[str, int], message: str, tmp_path: Path
) -> None:
    directory = make_checkpoint(architecture, tmp_path, **options)
    with pytest.raises(ConfigError, match=f"must divide the number of {message}"):
        Driver(directory, world_size=2)
