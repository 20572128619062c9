"""Norms have the epsilon that config.json gives, or one of their own.

In checkpoints epsilons are so small that no test sees one in place of another, or none. Here they are as large as the
numbers that they are added to.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.config_effects import written
from tests.unit.worker.models.reference import logprobs_of, make_prompts

KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
EPSILON = 0.4
MODELS = (
    "LlamaForCausalLM",
    "BambaForCausalLM",
    "BloomForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconMambaForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "JambaForCausalLM",
    "Llama4ForCausalLM",
    "NemotronForCausalLM",
    "Olmo2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Zamba2ForCausalLM",
)
"""One with each kind of norm: of hidden states, heads, widths, values, latents, states, steps and routers."""


@pytest.mark.parametrize("architecture", MODELS)
def test_a_large_epsilon_is_added_where_transformers_adds_it(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    given: dict[str, Any] = dict.fromkeys((key for key in KEYS if key in written(architecture)), EPSILON)
    assert given, "there is a norm"
    make_checkpoint(architecture, tmp_path, **given)
    (prompt,) = make_prompts((33,))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rows = logprobs_of(model, prompt)[:-1]
    expected = rows.gather(1, torch.tensor(prompt)[1:, None])[:, 0]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for kernels in ("all", "none"):
        (sequence,) = Driver(tmp_path, reference_kernels=(kernels,)).generate([prompt], params, max_tokens=1)
        found = torch.cat([torch.as_tensor(chunk.logprobs.logprobs) for chunk in sequence.prompt_logprobs])
        torch.testing.assert_close(found.float(), expected, rtol=0.0, atol=1e-3)
