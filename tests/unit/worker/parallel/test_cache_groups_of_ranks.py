"""Two ranks give transformers' tokens where layers keep different things of a sequence."""

from pathlib import Path

import pytest

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import NUM_TOKENS, make_prompts, open_reference


@pytest.mark.parametrize(
    "architecture", ["GptOssForCausalLM", "Qwen3NextForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM"]
)
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
