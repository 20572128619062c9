"""Mamba, Falcon Mamba, Mamba-2, Jamba and Zamba2: each option means something, and blocks are held once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pagoda_common.errors import ModelLoadError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.models.registry import FAMILIES, Family
from pagoda_worker.models.spec import DecoderSpec
from tests.checkpoints import CONFIGS, make_checkpoint
from tests.small_models.sizes import VOCAB_SIZE
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.outcomes import Outcome, copied, differ, outcome_of

FALCON, MAMBA2, JAMBA, ZAMBA = (
    *("FalconMambaForCausalLM", "Mamba2ForCausalLM", "JambaForCausalLM", "Zamba2ForCausalLM"),
)


@pytest.fixture(scope="module", params=[FALCON, MAMBA2, JAMBA, ZAMBA])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Outcome]:
    """An architecture, a checkpoint, and what comes of it, which test_exactness holds against transformers."""
    directory = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))
    return request.param, directory, outcome_of(directory)


def _net(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, recurrence=replace(spec.recurrence, **options))  # type: ignore[type-var]  # it is there


def _moe(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, moe=replace(spec.moe, **options))  # type: ignore[type-var]  # it is there


SPOILT: dict[str, tuple[tuple[str, ...], Callable[[DecoderSpec], DecoderSpec]]] = {
    "norm of steps and of what is read": ((FALCON,), _net(norm="none")),
    "its least square": ((FALCON,), _net(norm_eps=1e-6)),
    "groups of the norm": ((MAMBA2, ZAMBA), _net(norm_groups=1)),
    "least step": ((MAMBA2, ZAMBA), _net(steps=(3.0, float("inf")))),
    "weights that are not normalised": ((JAMBA,), _moe(is_normalized=True)),
    "number of experts": ((JAMBA,), _moe(num_experts_per_token=1)),
    "scale of scores": ((ZAMBA,), lambda spec: replace(spec, scales=())),
    "rotations": ((ZAMBA,), lambda spec: replace(spec, rope=None, has_positions=False)),
    "activation": ((ZAMBA,), lambda spec: replace(spec, activation="relu")),
}
"""An option as it should not be, and where it means something."""


@pytest.mark.parametrize("name", SPOILT)
def test_every_option_changes_what_comes_out(
    name: str, served: tuple[str, Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, directory, expected = served
    architectures, spoil = SPOILT[name]
    if architecture not in architectures:
        pytest.skip("it has no such option")
    family = FAMILIES[architecture]
    monkeypatch.setitem(FAMILIES, architecture, Family(lambda config: spoil(family.read(config)), family.names))
    assert differ(outcome_of(directory), expected)


TENSORS = {
    JAMBA: ("mamba.dt_layernorm.weight", "mamba.b_layernorm.weight", "mamba.c_layernorm.weight", "mamba.x_proj.weight"),
    ZAMBA: (
        *("linear_v_adapter_list.2.1.weight", "gate_up_proj_adapter_list.1.0.weight", "layers.3.linear.weight"),
        *("shared_transformer.input_layernorm.weight", "mamba_decoder.input_layernorm.weight"),
    ),
}


@pytest.mark.parametrize("name", [*TENSORS[JAMBA], *TENSORS[ZAMBA]])
def test_every_tensor_changes_what_comes_out(name: str, served: tuple[str, Path, Outcome], tmp_path: Path) -> None:
    architecture, directory, expected = served
    if name not in TENSORS.get(architecture, ()):
        pytest.skip("it has no such tensor")
    tensors = load_file(directory / "model.safetensors")
    found = [stored for stored in tensors if stored.endswith(name)]
    assert found
    for stored in found:
        tensors[stored] = 1.5 * tensors[stored].flip(0)
    assert differ(outcome_of(copied(directory, tmp_path, tensors)), expected)


def test_blocks_are_held_once(tmp_path: Path) -> None:
    """Three of the four layers have one, two of them the same."""
    model = Driver(make_checkpoint(ZAMBA, tmp_path)).worker._model
    names = [name for name, _ in model.named_parameters() if name.endswith("block.attention.qkv_proj.weight")]
    assert names == [f"layers.{layer}.block.attention.qkv_proj.weight" for layer in (0, 2)]
    assert len(model.attention_layers) == 3


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (ZAMBA, {"use_long_context": True}, "use_long_context is True"),
        (ZAMBA, {"layers_block_type": ["attention"]}, "layer type 'attention' is not supported"),
        (ZAMBA, {"num_mem_blocks": -1}, "num_mem_blocks and adapter_rank must be at least 1"),
        (FALCON, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (FALCON, {"state_size": -1}, "sizes of a Mamba layer must be at least 1"),
        (JAMBA, {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, must be between 1 and"),
    ],
)
def test_what_cannot_be_is_refused(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        FAMILIES[architecture].spec({"vocab_size": 300} | CONFIGS[architecture][1] | changes)


def test_zamba2_is_as_exact_in_bfloat16_as_transformers_is(tmp_path: Path) -> None:
    """On average: single tokens whose states nearly cancel differ by more, here and there."""
    directory = make_checkpoint(ZAMBA, tmp_path, seed=1)
    generator = torch.Generator().manual_seed(100)
    prompts = torch.randint(0, VOCAB_SIZE, (12, 33), generator=generator)

    def theirs(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        with torch.inference_mode():
            rows = torch.cat([model(prompt[None]).logits.float().log_softmax(-1) for prompt in prompts])
        return rows[:, :-1].gather(2, prompts[:, 1:, None])[..., 0]

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    sequences = Driver(directory, dtype="bfloat16").generate(prompts.tolist(), params, max_tokens=1)
    ours = [torch.cat([torch.as_tensor(chunk.logprobs.logprobs) for chunk in one.prompt_logprobs]) for one in sequences]
    exact = theirs(torch.float32)
    error, of_transformers = ((found - exact).abs().mean() for found in (torch.stack(ours), theirs(torch.bfloat16)))
    assert float(error) < 1.25 * float(of_transformers)
