"""Which rows of which layer a module of an adapter is, and what a rank takes of its matrices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.errors import ModelLoadError, OutOfMemory
from pagoda_worker.loader.build import ModelBuilder
from pagoda_worker.loader.checkpoint import open_checkpoint
from pagoda_worker.lora import peft_files
from pagoda_worker.lora.peft_files import read_adapter
from pagoda_worker.lora.targets import LoraTargets, Target
from pagoda_worker.models.model import BuildConfig
from pagoda_worker.parallel.tensor_parallel import TensorParallel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""24 rows of queries, 12 of keys and 12 of values."""
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "head_dim": None, "pad_token_id": 0}
"""Queries, keys and values are one tensor, of 16, 8 and 8 rows, and so are gate and up."""
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}


def targets_of(config: dict[str, Any], directory: Path, *, rank: int = 0, world_size: int = 1) -> LoraTargets:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    checkpoint = open_checkpoint(ModelConfig(model=str(directory)))
    parallel = TensorParallel(rank=rank, world_size=world_size)
    build = BuildConfig(checkpoint=checkpoint.config, engine=ModelConfig())
    builder = ModelBuilder(config=build, parallel=parallel)
    model = builder.build()
    return LoraTargets(model=model, whole=builder.build_whole(model), names=model.weights(()))


def told(target: Target | None) -> tuple[Any, ...] | None:
    """Layer, first row, number of outputs and of inputs, rows of the layer, and whether it is a table."""
    if target is None:
        return None
    row_start = target.source.row_start
    return target.layer, row_start, target.out_features, target.in_features, target.num_rows, target.is_table


QKV, UP = "layers.1.attention.qkv_proj", "layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.1.self_attn.q_proj", (QKV, 0, 24, 16, 48, False)),
        ("model.layers.1.self_attn.k_proj", (QKV, 24, 12, 16, 48, False)),
        ("model.layers.1.self_attn.v_proj", (QKV, 36, 12, 16, 48, False)),
        ("layers.1.self_attn.v_proj", (QKV, 36, 12, 16, 48, False)),
        ("model.layers.1.self_attn.o_proj", ("layers.1.attention.o_proj", 0, 16, 24, 16, False)),
        ("model.layers.1.mlp.gate_proj", (UP, 0, 24, 16, 48, False)),
        ("model.layers.1.mlp.up_proj", (UP, 24, 24, 16, 48, False)),
        ("model.layers.1.mlp.down_proj", ("layers.1.mlp.down_proj", 0, 16, 24, 16, False)),
        ("model.embed_tokens", ("embed_tokens", 0, 16, 40, 40, True)),
        ("lm_head", ("lm_head", 0, 40, 16, 40, False)),
        ("model.layers.1.self_attn.qkv_proj", (QKV, 0, 48, 16, 48, False)),
        ("model.layers.1.self_attn.query_key_value", (QKV, 0, 48, 16, 48, False)),
        ("model.layers.1.mlp.gate_up_proj", (UP, 0, 48, 16, 48, False)),
        ("model.layers.1.input_layernorm", None),
        ("model.layers.2.mlp.up_proj", None),
        ("model.layers.2.mlp.gate_up_proj", None),
        ("vision.layers.1.mlp.up_proj", None),
        ("model.layers.1.mlp.gate", None),
    ],
)
def test_modules_of_a_model_with_projections_apart(module: str, expected: Any, tmp_path: Path) -> None:
    targets = targets_of(LLAMA, tmp_path)
    assert told(targets.find(module)) == expected
    assert targets.experts(module) == []
    assert not targets.is_ignored(module)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.1.self_attn.qkv_proj", (QKV, 0, 32, 16, 32, False)),
        ("model.layers.1.self_attn.q_proj", (QKV, 0, 16, 16, 32, False)),
        ("model.layers.1.self_attn.k_proj", (QKV, 16, 8, 16, 32, False)),
        ("model.layers.1.self_attn.v_proj", (QKV, 24, 8, 16, 32, False)),
        ("model.layers.1.mlp.gate_up_proj", (UP, 0, 48, 16, 48, False)),
        ("model.layers.1.mlp.gate_proj", (UP, 0, 24, 16, 48, False)),
        ("model.layers.1.mlp.up_proj", (UP, 24, 24, 16, 48, False)),
        ("model.layers.1.mlp.q_proj", None),
    ],
)
def test_modules_of_a_model_with_projections_in_one(module: str, expected: Any, tmp_path: Path) -> None:
    assert told(targets_of(PHI3, tmp_path).find(module)) == expected


def test_experts_are_found_one_by_one_or_all_together(tmp_path: Path) -> None:
    targets = targets_of(MIXTRAL, tmp_path)
    pairs = targets.experts("model.layers.1.mlp.experts")
    assert [(told(up), told(down)) for up, down in pairs] == [
        (
            (f"layers.1.mlp.experts.{number}.up_proj", 0, 48, 16, 48, False),
            (f"layers.1.mlp.experts.{number}.down_proj", 0, 16, 24, 16, False),
        )
        for number in range(3)
    ]
    assert targets.experts("model.layers.2.mlp.experts") == []
    router = targets.find("model.layers.1.mlp.gate")
    assert router is not None
    assert (router.layer, router.out_features) == ("layers.1.mlp.router", 3)


def parts(targets: LoraTargets, module: str, *, rank: int = 1) -> list[tuple[int, list[float], list[float]]]:
    """First row, the columns of a and the rows of b of each part. Column i of a is i, row i of b is 100 + i."""
    target = targets.find(module)
    assert target is not None
    a = torch.arange(float(target.in_features)).repeat(rank, 1)
    b = 100 + torch.arange(float(target.out_features))[:, None].repeat(1, rank)
    made = list(targets.parts(target, a, b))
    assert all(part.a.shape[0] == rank for part in made)
    return [(part.row_start, part.a[0].tolist(), part.matrix[:, 0].tolist()) for part in made]


def numbers(start: int, stop: int) -> list[float]:
    return [float(number) for number in range(start, stop)]


def test_one_rank_takes_all(tmp_path: Path) -> None:
    targets = targets_of(LLAMA, tmp_path)
    assert parts(targets, "model.layers.1.self_attn.k_proj") == [(24, numbers(0, 16), numbers(100, 112))]
    assert parts(targets, "model.layers.1.self_attn.o_proj", rank=2) == [(0, numbers(0, 24), numbers(100, 116))]
    assert parts(targets, "model.embed_tokens") == [(0, numbers(0, 40), numbers(100, 116))]


def test_ranks_take_their_rows_and_columns(tmp_path: Path) -> None:
    """The second of two ranks: 12 rows of queries, 6 of keys and 6 of values; half of the columns of o_proj."""
    targets = targets_of(LLAMA, tmp_path, rank=1, world_size=2)
    assert parts(targets, "model.layers.1.self_attn.q_proj") == [(0, numbers(0, 16), numbers(112, 124))]
    assert parts(targets, "model.layers.1.self_attn.k_proj") == [(12, numbers(0, 16), numbers(106, 112))]
    assert parts(targets, "model.layers.1.self_attn.v_proj") == [(18, numbers(0, 16), numbers(106, 112))]
    assert parts(targets, "model.layers.1.self_attn.o_proj") == [(0, numbers(12, 24), numbers(100, 116))]
    assert parts(targets, "model.layers.1.mlp.up_proj") == [(12, numbers(0, 16), numbers(112, 124))]
    assert parts(targets, "lm_head") == [(0, numbers(0, 16), numbers(120, 140))]
    assert parts(targets, "model.embed_tokens") == [(0, numbers(0, 40), numbers(100, 116))]
    assert parts(targets, "model.layers.1.self_attn.qkv_proj") == [
        (0, numbers(0, 16), numbers(112, 124)),
        (12, numbers(0, 16), numbers(130, 136)),
        (18, numbers(0, 16), numbers(142, 148)),
    ]


def adapter(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


PLACE = "base_model.model.model.layers.1."


def pair(module: str, rank: int, num_inputs: int, num_outputs: int) -> dict[str, torch.Tensor]:
    return {
        f"{PLACE}{module}.lora_A.weight": torch.full((rank, num_inputs), 2.0),
        f"{PLACE}{module}.lora_B.weight": torch.full((num_outputs, rank), 5.0),
    }


def read(directory: Path, tmp_path: Path, *, config: Any = LLAMA, **options: Any) -> dict[str, Any]:
    given = {"dtype": torch.bfloat16, "max_rank": 4, **options}
    return read_adapter(directory, targets=targets_of(config, tmp_path), **given)


def test_matrices_are_scaled_and_put_together_by_layer(tmp_path: Path) -> None:
    tensors = {
        **pair("self_attn.q_proj", 2, 16, 24),
        **pair("self_attn.v_proj", 2, 16, 12),
        **pair("mlp.up_proj", 2, 16, 24),
    }
    layers = read(adapter(tmp_path / "a", tensors), tmp_path)
    assert sorted(layers) == [QKV, UP]
    assert [(part.row_start, part.num_rows) for part in layers[QKV]] == [(0, 24), (36, 12)]
    (part,) = layers[UP]
    assert (part.row_start, part.num_rows, part.a.dtype, part.b.dtype) == (24, 24, torch.bfloat16, torch.bfloat16)
    assert (part.a.unique().tolist(), part.matrix.unique().tolist()) == ([2], [15])


def test_only_some_modules_may_be_taken(tmp_path: Path) -> None:
    tensors = {**pair("self_attn.q_proj", 2, 16, 24), **pair("mlp.up_proj", 2, 16, 24)}
    layers = read(adapter(tmp_path / "a", tensors), tmp_path, only=("up_proj", "other"))
    assert sorted(layers) == [UP]


@pytest.mark.parametrize(("rank", "fits"), [(1, True), (4, True), (5, False)])
def test_ranks_are_within_the_bound(rank: int, fits: bool, tmp_path: Path) -> None:
    directory = adapter(tmp_path / "a", pair("mlp.up_proj", rank, 16, 24))
    if fits:
        assert read(directory, tmp_path)[UP][0].a.shape[0] == rank
        return
    with pytest.raises(ModelLoadError, match=r"lora_B\.weight has rank 5, must be between 1 and max_lora_rank, 4$"):
        read(directory, tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "adapter_model.safetensors has no tensors"),
        (pair("mlp.up_proj", 2, 15, 24), "and its other half have shape [2, 15], must be [2, 16]"),
        (pair("mlp.up_proj", 2, 16, 23), "up_proj.lora_B.weight has shape [23, 2], must be [24, 2]"),
        (pair("mlp.other", 2, 16, 24), "other.lora_B.weight cannot be used: the model has no such matrix"),
        ({f"{PLACE}mlp.up_proj.weight": torch.ones(2, 2)}, "cannot be used: it is not a matrix of a low-rank adapter"),
        (
            {f"{PLACE}mlp.up_proj.lora_A.weight": torch.ones(2, 16)},
            "up_proj.lora_A.weight has no other half",
        ),
        (
            {
                f"{PLACE}mlp.up_proj.lora_A.weight": torch.ones(2, 16, dtype=torch.int32),
                f"{PLACE}mlp.up_proj.lora_B.weight": torch.ones(24, 2),
            },
            "lora_A.weight has shape [2, 16] of torch.int32, must be a matrix of floats",
        ),
        (
            {
                f"{PLACE}mlp.up_proj.lora_A.weight": torch.ones(2, 16),
                f"{PLACE}mlp.up_proj.lora_B.weight": torch.ones(24),
            },
            "lora_B.weight has shape [24] of torch.float32, must be a matrix of floats",
        ),
    ],
)
def test_what_does_not_fit_is_named(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(adapter(tmp_path / "a", tensors), tmp_path)
    assert message in str(error.value)


def test_a_table_is_no_matrix(tmp_path: Path) -> None:
    place = "base_model.model.model.embed_tokens.lora"
    table = {f"{place}_embedding_A": torch.ones(2, 40), f"{place}_embedding_B": torch.ones(16, 2)}
    (part,) = read(adapter(tmp_path / "a", table), tmp_path)["embed_tokens"]
    assert (part.row_start, part.num_rows, part.a.shape[1]) == (0, 16, 40)
    matrix = {f"{place}_A.weight": torch.ones(2, 40), f"{place}_B.weight": torch.ones(16, 2)}
    with pytest.raises(ModelLoadError, match=r"the model has no such matrix that adapters can change$"):
        read(adapter(tmp_path / "b", matrix), tmp_path)


def test_stacked_experts_are_taken_apart(tmp_path: Path) -> None:
    """Ranks of experts lie one after the other in a, and side by side in b."""
    a = torch.arange(6.0)[:, None].repeat(1, 16)
    b = torch.arange(6.0).repeat(48, 1)
    tensors = {f"{PLACE}mlp.experts.lora_A.weight": a, f"{PLACE}mlp.experts.lora_B.weight": b}
    layers = read(adapter(tmp_path / "a", tensors, lora_alpha=2), tmp_path, config=MIXTRAL)
    assert sorted(layers) == [f"layers.1.mlp.experts.{number}.up_proj" for number in range(3)]
    for number in range(3):
        (part,) = layers[f"layers.1.mlp.experts.{number}.up_proj"]
        assert part.a[:, 0].tolist() == [2 * number, 2 * number + 1]
        assert part.matrix[0].tolist() == [number, number + 3]
    tensors[f"{PLACE}mlp.experts.lora_B.weight"] = torch.ones(47, 6)
    with pytest.raises(ModelLoadError, match=r"\[6, 16\] and \[47, 6\] fit no matrices of 3 experts$"):
        read(adapter(tmp_path / "b", tensors), tmp_path, config=MIXTRAL)


@pytest.mark.parametrize("more", [0, 1])
def test_an_adapter_has_to_fit_the_memory_of_the_host(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = adapter(tmp_path / "a", pair("mlp.up_proj", 2, 16, 24))
    size = (directory / "adapter_model.safetensors").stat().st_size
    monkeypatch.setattr(peft_files, "available_memory_bytes", lambda: size - more)
    if not more:
        read(directory, tmp_path)
        return
    with pytest.raises(
        OutOfMemory, match=r"adapter_model\.safetensors needs 0 MiB of host memory, 0 MiB are available$"
    ):
        read(directory, tmp_path)


@pytest.mark.parametrize(("is_pickled", "hint"), [(False, ""), (True, "pickled weights are not read")])
def test_an_adapter_is_a_safetensors_file(is_pickled: bool, hint: str, tmp_path: Path) -> None:
    directory = adapter(tmp_path / "a", {})
    (directory / "adapter_model.safetensors").unlink()
    if is_pickled:
        (directory / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError) as error:
        read(directory, tmp_path)
    assert "has no adapter_model.safetensors" in str(error.value)
    assert ("pickled" in str(error.value)) is is_pickled
    assert hint in str(error.value)
