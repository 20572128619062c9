"""Options of decoders: sizes at their bounds, and what each layer has where layers differ."""

from dataclasses import replace
from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.moe.route_tokens import Routing
from pagoda_worker.models.layer_options import AltUpSpec, LayerInputsSpec, LayerSizes, SharedBlocksSpec
from pagoda_worker.models.spec import DecoderSpec, LatentSpec, MoeSpec, RopeSpec

MOE = MoeSpec(num_experts=12, num_experts_per_token=6, intermediate_size=8, num_groups=4, top_groups=2)
LATENT = LatentSpec(kv_rank=1, key_dim=1, value_dim=1, q_rank=1)
SIZES = LayerSizes(num_kv_heads=1, head_dim=1, intermediate_size=1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_experts_per_token": 0}, "num_experts_per_tok is 0, must be between 1 and num_experts, 12"),
        ({"num_experts_per_token": 13}, "num_experts_per_tok is 13, must be between 1 and num_experts, 12"),
        ({"num_groups": 0}, "n_group is 0, must divide num_experts, 12"),
        ({"num_groups": 5}, "n_group is 5, must divide num_experts, 12"),
        ({"top_groups": 0}, "topk_group is 0, must be between 1 and n_group, 4"),
        ({"top_groups": 5}, "topk_group is 5, must be between 1 and n_group, 4"),
        ({"num_experts_per_token": 7}, "num_experts_per_tok is 7, but 2 groups have 6 experts"),
    ],
)
def test_experts_that_no_token_can_have_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        replace(MOE, **options)


def test_a_token_may_have_all_experts() -> None:
    replace(MOE, top_groups=4, num_experts_per_token=12)
    MoeSpec(num_experts=1, num_experts_per_token=1, intermediate_size=1)


def test_the_router_has_the_options_of_the_spec() -> None:
    options: dict[str, Any] = {"scoring": "sigmoid", "is_normalized": False, "norm_min": 0.1, "norm_added": 0.2}
    options |= {"scale": 3.0, "group_score": "top_two"}
    expected = Routing(top_k=6, num_groups=4, top_groups=2, **options)
    assert replace(MOE, **options).routing == expected


def test_layers_that_are_not_named_have_experts() -> None:
    spec = DecoderSpec(moe=replace(MOE, sparse_layers=(False, True)))
    assert [spec.layer_moe(layer) for layer in range(2)] == [None, spec.moe]
    spec = DecoderSpec(moe=MOE)
    assert [spec.layer_moe(layer) for layer in range(2)] == [MOE, MOE]
    assert DecoderSpec().layer_moe(0) is None


@pytest.mark.parametrize("name", ["kv_rank", "key_dim", "value_dim", "q_rank"])
def test_sizes_of_latent_attention_are_at_least_1(name: str) -> None:
    with pytest.raises(ModelLoadError, match="sizes of latent attention must be at least 1"):
        replace(LATENT, **{name: 0})
    assert replace(LATENT, q_rank=None).q_rank is None


@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "intermediate_size"])
def test_sizes_of_a_layer_are_at_least_1(name: str) -> None:
    with pytest.raises(ModelLoadError, match="sizes of a layer must be at least 1"):
        replace(SIZES, **{name: 0})


def test_the_sparsity_of_a_layer_is_a_share() -> None:
    assert replace(SIZES, sparsity=0.99).sparsity == 0.99
    for sparsity in (-0.1, 1.0):
        with pytest.raises(ModelLoadError, match=r"activation_sparsity_pattern has .*, must be in \[0, 1\)"):
            replace(SIZES, sparsity=sparsity)


@pytest.mark.parametrize("name", ["width", "vocab_size"])
def test_sizes_of_inputs_of_layers_are_at_least_1(name: str) -> None:
    spec = LayerInputsSpec(width=1, vocab_size=1)
    with pytest.raises(ModelLoadError, match="sizes of inputs of layers must be at least 1"):
        replace(spec, **{name: 0})


@pytest.mark.parametrize("active", [-1, 2])
def test_layers_compute_one_of_the_hidden_states(active: int) -> None:
    assert AltUpSpec(num_streams=2, active=1, laurel_rank=1).active == 1
    with pytest.raises(ModelLoadError, match=f"altup_active_idx is {active}, must be from 0 to below .*, 2"):
        AltUpSpec(num_streams=2, active=active)
    with pytest.raises(ModelLoadError, match="altup_active_idx"):
        AltUpSpec(num_streams=0)
    with pytest.raises(ModelLoadError, match="laurel_rank is 0, must be at least 1"):
        AltUpSpec(num_streams=2, laurel_rank=0)


def test_shared_blocks_and_their_matrices_are_at_least_1() -> None:
    SharedBlocksSpec(num_blocks=1, adapter_rank=1)
    for name in ("num_blocks", "adapter_rank"):
        with pytest.raises(ModelLoadError, match="num_mem_blocks and adapter_rank must be at least 1"):
            SharedBlocksSpec(**{name: 0})


@pytest.mark.parametrize(
    "name",
    [
        *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
        "max_position_embeddings",
    ],
)
def test_sizes_of_a_model_are_at_least_1(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} is 0, must be at least 1"):
        DecoderSpec(**{name: 0})  # type: ignore[arg-type]  # one of its sizes


@pytest.mark.parametrize("name", ["mixers", "feed_forwards", "layer_sizes"])
def test_what_layers_have_is_given_for_all_of_them(name: str) -> None:
    values = {"mixers": "attention", "feed_forwards": True, "layer_sizes": SIZES}
    for count in (1, 3):
        with pytest.raises(ModelLoadError, match=f"{count} {name} are given for 2 layers"):
            DecoderSpec(**{name: (values[name],) * count})
    DecoderSpec(**{name: (values[name],) * 2})


def test_heads_share_those_of_the_cache_evenly() -> None:
    with pytest.raises(ModelLoadError, match="4 heads cannot share 3 KV heads evenly"):
        DecoderSpec(num_heads=4, num_kv_heads=3)
    with pytest.raises(ModelLoadError, match="4 heads cannot share 3 KV heads evenly"):
        DecoderSpec(layer_sizes=(SIZES, replace(SIZES, num_kv_heads=3)))


@pytest.mark.parametrize(("share", "num_rotated"), [(0.0, 0), (0.3, 3), (1.2, 12)])
def test_rotated_values_are_pairs_within_a_head(share: float, num_rotated: int) -> None:
    with pytest.raises(ModelLoadError, match=f"{num_rotated} of head_dim 10 are rotated, must be even"):
        DecoderSpec(head_dim=10, rope=RopeSpec(partial_rotary_factor=share))


def test_a_head_may_be_rotated_as_a_whole() -> None:
    assert RopeSpec().rotary_dim(10) == 10
    assert RopeSpec(partial_rotary_factor=0.2).rotary_dim(10) == 2
    assert RopeSpec(partial_rotary_factor=0.5, head_dim=8).rotary_dim(10) == 4
    DecoderSpec(head_dim=10, rope=RopeSpec())
    DecoderSpec(head_dim=6, rope=RopeSpec(head_dim=10))


@pytest.mark.parametrize("owner", [-1, 1, 2])
def test_a_layer_reads_the_cache_of_an_earlier_one(owner: int) -> None:
    with pytest.raises(ModelLoadError, match=f"layer 1 reads the cache of layer {owner}, must be an earlier one"):
        DecoderSpec(layer_sizes=(SIZES, replace(SIZES, cache_of=owner)))
    DecoderSpec(layer_sizes=(SIZES, replace(SIZES, cache_of=0)))


def test_layers_are_counted_among_those_that_keep_something() -> None:
    own, shares = SIZES, replace(SIZES, cache_of=1)
    spec = DecoderSpec(
        num_layers=6,
        mixers=("recurrent", "attention", "both", "none", "attention", "recurrent"),
        layer_sizes=(own, own, own, own, shares, own),
    )
    layers = range(6)
    assert [spec.attends(layer) for layer in layers] == [False, True, True, False, True, False]
    assert [spec.keeps_tokens(layer) for layer in layers] == [False, True, True, False, False, False]
    assert [spec.is_recurrent(layer) for layer in layers] == [True, False, True, False, False, True]
    assert [spec.cache_index(layer) for layer in (1, 2, 4)] == [0, 1, 0]
    assert [spec.state_index(layer) for layer in (0, 2, 5)] == [0, 1, 2]


def test_heads_of_the_first_projection_of_attention() -> None:
    layer_sizes = (replace(SIZES, num_kv_heads=4), replace(SIZES, values_are_keys=True), replace(SIZES, cache_of=0))
    spec = DecoderSpec(num_layers=3, num_heads=4, layer_sizes=layer_sizes)
    assert [spec.num_kv_projections(layer) for layer in range(3)] == [2, 1, 0]
    assert [spec.num_qkv_heads(layer) for layer in range(3)] == [12, 5, 4]
    assert [spec.of_layer(layer).num_kv_heads for layer in range(3)] == [4, 1, 1]
    assert DecoderSpec(num_heads=6, num_kv_heads=3).num_qkv_heads(0) == 12
    assert DecoderSpec(num_heads=6, num_kv_heads=3, has_attention_gate=True).num_qkv_heads(0) == 18


def test_norms_stand_where_the_model_has_them() -> None:
    names = {
        "input": ("attention_norm", "mlp_norm"),
        "output": ("attention_output_norm", "mlp_output_norm"),
        "both": ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
        "sum": ("attention_sum_norm", "mlp_sum_norm"),
    }
    for places, expected in names.items():
        assert DecoderSpec(norms=places).layer_norms(0) == expected  # type: ignore[arg-type]  # one of its literals
    assert DecoderSpec(has_mlp_norm=False).layer_norms(0) == ("attention_norm",)
    spec = DecoderSpec(mixers=("attention", "none"), feed_forwards=(False, True))
    assert [spec.layer_norms(layer) for layer in range(2)] == [("attention_norm",), ("mlp_norm",)]


def test_positions_are_learned_where_nothing_else_says_them() -> None:
    assert DecoderSpec().has_learned_positions
    assert not DecoderSpec(rope=RopeSpec()).has_learned_positions
    assert not DecoderSpec(alibi_slopes=(0.5,) * 4).has_learned_positions
    assert not DecoderSpec(has_positions=False).has_learned_positions


def test_options_of_a_layer_are_the_models_unless_layers_differ() -> None:
    one, other = RopeSpec(), RopeSpec(theta=1e6)
    differing = DecoderSpec(
        num_layers=3,
        rope=other,
        layer_ropes=(one, None, one),
        windows=(3, None, 5),
        chunks=(None, 7, None),
        scales=(0.1, 0.2, 0.3),
        qk_norm="plain",
        layer_sizes=(SIZES, replace(SIZES, sparsity=0.5), replace(SIZES, is_linear=True)),
    )
    layers = range(3)
    assert differing.ropes == (one,)
    assert [differing.layer_rope(layer) for layer in layers] == [one, None, one]
    assert [differing.window(layer) for layer in layers] == [3, None, 5]
    assert [differing.chunk(layer) for layer in layers] == [None, 7, None]
    assert [differing.scale(layer) for layer in layers] == [0.1, 0.2, 0.3]
    assert [differing.layer_qk_norm(layer) for layer in layers] == ["plain", None, "plain"]
    assert [differing.sparsity(layer) for layer in layers] == [0.0, 0.5, 0.0]
    assert [differing.has_linear_feed_forward(layer) for layer in layers] == [False, False, True]
    same = DecoderSpec(head_dim=4, rope=other, qk_norm="head")
    assert same.ropes == (other,)
    assert (same.layer_rope(1), same.window(1), same.chunk(1), same.scale(1)) == (other, None, None, 0.5)
    assert (same.layer_qk_norm(1), same.sparsity(1), same.has_linear_feed_forward(1)) == ("head", 0.0, False)
