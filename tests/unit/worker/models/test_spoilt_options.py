"""Every option of a family means something: without any one of them, something else comes out, or loading fails.

`test_exactness` compares what comes out with transformers, so it fails where an option is not as it should be. Options
of DeepSeek, Gemma, Llama 4, Jamba, Mamba-2, MiniMax and Mixtral are in tests of their own.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pagoda_common.errors import ModelLoadError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.models.registry import FAMILIES, Family
from pagoda_worker.models.spec import DecoderSpec, MoeSpec, RopeSpec
from tests.checkpoints import make_checkpoint
from tests.small_models.sizes import VOCAB_SIZE
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.outcomes import copied

ARCHITECTURES = (
    "BambaForCausalLM",
    "DeciLMForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneForCausalLM",
    "FalconH1ForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "InternLM3ForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "MambaForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
SIZES = {"architecture", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"}
SIZES |= {"intermediate_size", "max_position_embeddings", "num_experts", "shared_intermediate_size"}
"""Without them there is no model of these tensors."""
WITHOUT_EFFECT = {
    "Qwen3_5MoeForCausalLM": ["moe.sparse_layers"],
    "GptOssForCausalLM": ["activation"],
    "MambaForCausalLM": ["activation"],
}
"""Options that change nothing, by architecture: that all layers have experts, and how others than experts compute,
or feed-forwards that there are not."""
PROMPT = torch.randint(0, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(3)).tolist()


ROTATIONS: dict[str, Callable[[RopeSpec], RopeSpec]] = {
    "theta": lambda rope: dataclasses.replace(rope, theta=rope.theta / 50),
    "is_interleaved": lambda rope: dataclasses.replace(rope, is_interleaved=not rope.is_interleaved),
    "rope_type": lambda rope: dataclasses.replace(rope, rope_type="linear", parameters=(("factor", 7.0),)),
}


def without_options(spec: DecoderSpec) -> Iterator[tuple[str, DecoderSpec]]:
    """The spec with one option after the other as if it was not known, or as another family has it."""
    for name in _given(spec):
        yield name, _replaced(spec, **{name: _default(spec, name)})
    yield "norm_eps", dataclasses.replace(spec, norm_eps=1.0)
    if spec.qk_norm == "turned_head":
        yield "qk_norm before the rotation", dataclasses.replace(spec, qk_norm="head")
    yield "activation", dataclasses.replace(spec, activation="gelu" if spec.activation == "relu" else "relu")
    if spec.moe is not None:
        for name, moe in _of_experts(spec.moe):
            yield f"moe.{name}", dataclasses.replace(spec, moe=moe)
    if spec.rope is not None:
        for name, change in ROTATIONS.items():
            layer_ropes = tuple(rope and change(rope) for rope in spec.layer_ropes)
            yield f"rope.{name}", dataclasses.replace(spec, rope=change(spec.rope), layer_ropes=layer_ropes)
    for part in ("recurrence", "latent"):
        for name in _given(getattr(spec, part)) if getattr(spec, part) is not None else ():
            changed = _replaced(getattr(spec, part), **{name: _default(getattr(spec, part), name)})
            yield f"{part}.{name}", dataclasses.replace(spec, **{part: changed})


def _of_experts(moe: MoeSpec) -> Iterator[tuple[str, MoeSpec]]:
    for name in _given(moe):
        if name not in ("num_groups", "top_groups"):
            yield name, dataclasses.replace(moe, **{name: _default(moe, name)})
    if moe.num_groups > 1:
        yield "groups", dataclasses.replace(moe, num_groups=1, top_groups=1)
    if moe.activation is not None:
        for name, value in (("limit", 0.2), ("alpha", 0.5), ("up_offset", 0.0)):
            yield (
                f"activation.{name}",
                dataclasses.replace(moe, activation=dataclasses.replace(moe.activation, **{name: value})),
            )
    yield "is_normalized", dataclasses.replace(moe, is_normalized=not moe.is_normalized)
    yield "scoring", dataclasses.replace(moe, scoring="sigmoid" if moe.scoring == "softmax" else "softmax")
    yield "num_experts_per_token", dataclasses.replace(moe, num_experts_per_token=1)


def _given(options: Any) -> list[str]:
    """Names of the fields that differ from their defaults."""
    fields = [field for field in dataclasses.fields(options) if field.name not in SIZES]
    fields = [field for field in fields if field.default is not dataclasses.MISSING]
    given = [field.name for field in fields if getattr(options, field.name) != field.default]
    return [name for name in given if name not in ("moe", "rope", "recurrence", "latent", "norm_eps", "activation")]


def _default(options: Any, name: str) -> Any:
    if name == "norm_added":  # so little that nothing shows without it
        return 0.5
    return next(field.default for field in dataclasses.fields(options) if field.name == name)


def _replaced(options: Any, **changes: Any) -> Any:
    return dataclasses.replace(options, **changes)


def logprobs(directory: Path) -> torch.Tensor:
    """Of the prompt's tokens, and of two after it."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    (sequence,) = Driver(directory).generate([PROMPT], params, max_tokens=2)
    chunks = [torch.as_tensor(chunk.logprobs.logprobs) for chunk in sequence.prompt_logprobs]
    return torch.cat([*chunks, torch.tensor([max(row.values()) for row in sequence.logprobs])])


def comes_out_differently(directory: Path, expected: torch.Tensor) -> bool:
    """By more than rounding; or what the checkpoint has does not fit any more."""
    try:
        return not float((logprobs(directory) - expected).abs().max()) <= 1e-2
    except (ModelLoadError, RuntimeError, ValueError, KeyError, AssertionError):
        return True


@pytest.fixture(scope="module", params=ARCHITECTURES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, torch.Tensor]:
    """An architecture, a checkpoint, and what comes out."""
    directory = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))
    return request.param, directory, logprobs(directory)


def test_without_any_one_option(served: tuple[str, Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, directory, expected = served
    family, seen = FAMILIES[architecture], dict[str, bool]()
    spec = family.spec(json.loads((directory / "config.json").read_text()))
    for name, changed in without_options(spec):
        monkeypatch.setitem(FAMILIES, architecture, Family(partial(_read, family, changed), family.names))
        seen[name] = comes_out_differently(directory, expected)
    assert len(seen) > 5
    assert [name for name, is_seen in seen.items() if not is_seen] == WITHOUT_EFFECT.get(architecture, [])


def _read(family: Family, changed: DecoderSpec, config: HfConfig) -> DecoderSpec:
    """Another spec than config.json says; all of it is read, or loading would refuse what is not."""
    family.read(config)
    return changed


def test_every_kind_of_tensor(served: tuple[str, Path, torch.Tensor], tmp_path: Path) -> None:
    """Decays of states, corrections of routers, sinks, gates, norms, biases, …"""
    _, directory, expected = served
    tensors = load_file(directory / "model.safetensors")
    kinds: dict[str, list[str]] = {}
    for name in tensors:
        kinds.setdefault(re.sub(r"\.\d+\.", ".N.", name), []).append(name)
    unseen = []
    for kind, names in kinds.items():
        changed = tensors | {name: 1.5 * tensors[name].flip(0) + 0.1 for name in names}
        if not comes_out_differently(copied(directory, tmp_path, changed), expected):
            unseen.append(kind)
    assert unseen == []
