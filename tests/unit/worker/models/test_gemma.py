"""Gemma 3n and 4: each option of a layer means something, shared caches are read and not kept, and what the files of
multimodal checkpoints have besides is left out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_worker.models.registry import FAMILIES, Family
from pagoda_worker.models.spec import DecoderSpec, RopeSpec
from tests.checkpoints import CONFIGS, make_checkpoint, write_as_text_part
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.outcomes import Outcome, copied, differ, outcome_of

N3, V4 = "Gemma3nForCausalLM", "Gemma4ForCausalLM"


@pytest.fixture(scope="module", params=[N3, V4])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Outcome]:
    """An architecture, a checkpoint, and what comes of it, which test_exactness holds against transformers."""
    directory = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))
    return request.param, directory, outcome_of(directory)


def _of_layers(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, layer_sizes=tuple(replace(one, **options) for one in spec.layer_sizes))


def _reads_the_first(spec: DecoderSpec) -> DecoderSpec:
    """Layers with a window read the cache of the first one with a window, not of the last."""
    sizes = [replace(one, cache_of=0) if one.cache_of == 2 else one for one in spec.layer_sizes]
    return replace(spec, layer_sizes=tuple(sizes))


def _alt_up(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, alt_up=replace(spec.alt_up, **options))  # type: ignore[type-var]  # it is there


def _moe(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, moe=replace(spec.moe, **options))  # type: ignore[type-var]  # it is there


def _ropes(change: Callable[[RopeSpec], RopeSpec]) -> Callable[[DecoderSpec], DecoderSpec]:
    def spoil(spec: DecoderSpec) -> DecoderSpec:
        assert spec.rope is not None, "both have rotations"
        return replace(spec, rope=change(spec.rope), layer_ropes=tuple(one and change(one) for one in spec.layer_ropes))

    return spoil


def _rotated_whole(rope: RopeSpec) -> RopeSpec:
    return replace(rope, rope_type="default", parameters=())


SPOILT: dict[str, tuple[tuple[str, ...], Callable[[DecoderSpec], DecoderSpec]]] = {
    "norm of values": ((N3, V4), lambda spec: replace(spec, norms_values=False)),
    "scale of scores": ((N3, V4), lambda spec: replace(spec, scales=())),
    "windows": ((N3, V4), lambda spec: replace(spec, windows=())),
    "cap of logits": ((N3, V4), lambda spec: replace(spec, logit_softcap=None)),
    "multiplier on embeddings": ((N3, V4), lambda spec: replace(spec, embedding_multiplier=1.0)),
    "base of rotations": ((N3, V4), _ropes(lambda rope: replace(rope, theta=50.0))),
    "proportion of rotations": ((V4,), _ropes(_rotated_whole)),
    "whose cache is read": ((N3, V4), _reads_the_first),
    "sparsity": ((N3,), _of_layers(sparsity=0.0)),
    "active hidden state": ((N3,), _alt_up(active=0)),
    "scale of what meets inputs": ((N3,), _alt_up(has_output_scale=False)),
    "number of experts": ((V4,), _moe(num_experts_per_token=1)),
}
"""An option as it should not be, and where it means something. Whether weights of experts sum to one does not: a norm
follows."""


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
    N3: (
        *("altup.correct_output_scale", "altup.router_norm.weight", "altup.modality_router.weight"),
        *("altup.prediction_coefs.weight", "altup.correction_coefs.weight", "laurel.post_laurel_norm.weight"),
        *("laurel.linear_left.weight", "per_layer_input_gate.weight", "post_per_layer_input_norm.weight"),
        *("altup_projections.1.weight", "altup_unembed_projections.0.weight"),
        *("model.embed_tokens_per_layer.weight", "model.per_layer_projection_norm.weight"),
    ),
    V4: (
        *("layer_scalar", "router.scale", "router.per_expert_scale", "pre_feedforward_layernorm_2.weight"),
        *("post_feedforward_layernorm_1.weight", "post_feedforward_layernorm_2.weight", "experts.down_proj"),
        *("per_layer_input_gate.weight", "model.per_layer_model_projection.weight"),
    ),
}


@pytest.mark.parametrize("name", sorted({*TENSORS[N3], *TENSORS[V4]}))
def test_every_tensor_changes_what_comes_out(name: str, served: tuple[str, Path, Outcome], tmp_path: Path) -> None:
    """Each is turned round, so that another order of its numbers is what differs."""
    architecture, directory, expected = served
    if name not in TENSORS[architecture]:
        pytest.skip("it has no such tensor, or the other one has it too")
    tensors = load_file(directory / "model.safetensors")
    found = [stored for stored in tensors if stored.endswith(name)]
    assert found
    for stored in found:
        tensors[stored] = 1.5 * tensors[stored].flip(0)
    assert differ(outcome_of(copied(directory, tmp_path, tensors)), expected)


def test_shared_layers_have_no_cache(served: tuple[str, Path, Outcome]) -> None:
    _, directory, _ = served
    model = Driver(directory).worker._model
    assert model.num_layers == 5
    assert len(model.attention_layers) == 3


def test_tensors_of_shared_layers_are_left_out(served: tuple[str, Path, Outcome], tmp_path: Path) -> None:
    """Published checkpoints have keys and values of layers that read those of others."""
    _, directory, expected = served
    tensors = load_file(directory / "model.safetensors")
    for leaf in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{leaf}.weight"] = torch.zeros(2, 2)
    assert outcome_of(copied(directory, tmp_path, tensors)) == expected
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(2)
    with pytest.raises(ModelLoadError, match=r"unexpected tensors: model\.layers\.1\.self_attn\.sinks"):
        Driver(copied(directory, tmp_path, tensors))


def test_the_text_part_of_gemma_3n_among_others(tmp_path: Path) -> None:
    """transformers cannot make such a checkpoint without a package for images: its text part is written as one."""
    expected = outcome_of(make_checkpoint(N3, tmp_path))
    write_as_text_part(tmp_path, "Gemma3nForConditionalGeneration", "gemma3n")
    assert outcome_of(tmp_path) == expected


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (N3, {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5, must be from 0 to below 5"),
        (N3, {"num_kv_shared_layers": 4}, "no layer before has full_attention"),
        (N3, {"intermediate_size": [80, 80]}, "intermediate_size has 2 entries for 5 layers"),
        (N3, {"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 entries for 5 layers"),
        (N3, {"activation_sparsity_pattern": 1.0}, r"must be in \[0, 1\)"),
        (N3, {"altup_active_idx": 3}, "altup_active_idx is 3, must be from 0"),
        (V4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        (V4, {"per_layer_config": {"1": {"num_attention_heads": 2}}}, "per_layer_config has .*num_attention_heads"),
        (V4, {"num_experts": None}, "config.json has no num_experts"),
        (V4, {"num_global_key_value_heads": 3}, "4 heads cannot share 3 KV heads evenly"),
    ],
)
def test_what_cannot_be_is_refused(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        FAMILIES[architecture].spec({"vocab_size": 300} | CONFIGS[architecture][1] | changes)


def test_old_and_new_forms_of_heads_say_the_same() -> None:
    options: dict[str, Any] = {"vocab_size": 300} | CONFIGS[V4][1]
    of_global = {"head_dim": 24, "num_key_value_heads": 1}
    new = {name: value for name, value in options.items() if "global" not in name}
    new["per_layer_config"] = {"1": of_global, "4": of_global}
    assert FAMILIES[V4].spec(new) == FAMILIES[V4].spec(options)


def test_ranks_that_do_not_divide_a_layer_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(N3, tmp_path, intermediate_size=[80, 64, 81, 96, 48])
    with pytest.raises(ConfigError, match="must divide intermediate_size, 81"):
        Driver(directory, world_size=2)
