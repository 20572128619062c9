"""Parts of a checkpoint by themselves: its config's bounds, its files, its tensors' order and the rows of a rank."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import ModelLoadError
from pagoda_worker.loader import config_bounds, weights
from pagoda_worker.loader.checkpoint import Checkpoint
from pagoda_worker.loader.config_bounds import check_config
from pagoda_worker.loader.held_parts import copy_part, in_order
from pagoda_worker.loader.loaded_model import LARGE_MODEL_BYTES, LoadedModel
from pagoda_worker.loader.mistral_tensors import is_mistral, mistral_tensors
from pagoda_worker.loader.read_buffers import GRAIN, MAX_KEPT_BYTES, MOST_TIMES_TOO_LARGE, ReadBuffers
from pagoda_worker.loader.stored import StoredTensor
from pagoda_worker.loader.tensor_file import TensorFile, in_halves
from pagoda_worker.models.cache_groups import plain_layout
from pagoda_worker.models.model import AttentionLayer, RecurrentLayer, StateTensor
from pagoda_worker.models.weights import WeightNames, WeightSource
from tests.unit.worker.loader.rank_part import Sharding

# config.json.


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, 1024) for name in ("num_hidden_layers", "n_layers", "num_layers", "n_layer", "num_layer")),
        *((name, 65_536) for name in ("num_experts_per_tok", "num_attention_heads", "n_head", "num_key_value_heads")),
        *((name, 65_536) for name in ("num_kv_heads", "n_heads", "num_query_heads")),
        *((name, 2**22) for name in ("intermediate_size", "moe_intermediate_size", "hidden_size", "head_dim")),
        *((name, 2**22) for name in ("ffn_hidden_size", "word_embed_proj_dim", "ffn_dim", "d_model", "n_embd")),
        *((name, 2**22) for name in ("n_inner", "rotary_dim", "expansion_ratio", "hidden_dim")),
        ("vocab_size", 2**24),
        *((name, 2**27) for name in ("max_position_embeddings", "original_max_position_embeddings", "n_positions")),
        *((name, 2**27) for name in ("max_seq_len", "seq_length")),
        ("anything_else", 2**63 - 1),
    ],
)
def test_sizes_are_bounded_at_the_number_that_is_named(name: str, most: int) -> None:
    check_config({name: most})
    check_config({name: -most})
    for config in ({name: most + 1}, {name: -most - 1}, {"text_config": {name: most + 1}}, {name: [1, most + 1]}):
        with pytest.raises(ModelLoadError, match=f"{name} is .* in config.json, must be at most {most}"):
            check_config(config)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_are_bounded_by_layer_and_in_all(name: str) -> None:
    check_config({name: 65_536})
    with pytest.raises(ModelLoadError, match=f"{name} is 65537 in config.json, must be at most 65536"):
        check_config({name: 65_537})
    assert config_bounds.MAX_EXPERTS == 2**18
    check_config({name: 1024, "num_hidden_layers": 256})
    with pytest.raises(ModelLoadError, match="asks for 263168 experts in all layers, must be at most 262144"):
        check_config({"text_config": {name: 1024}, "num_hidden_layers": 257})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": "LlamaForCausalLM"},
            "architectures is 'LlamaForCausalLM' in config.json, must be a list of",
        ),
        ({"architectures": [1]}, "must be a list of names"),
        ({"model_type": 3}, "model_type is 3 in config.json, must be a name"),
        ({"dtype": []}, "dtype is .* must be a name"),
        ({"torch_dtype": {}}, "torch_dtype is {} in config.json, must be a name"),
        ({"hidden_size": "64"}, "hidden_size is '64' in config.json, must be a number"),
        ({"hidden_size": {}}, "hidden_size is {} in config.json, must be a number"),
        ({"hidden_size": float("nan")}, "hidden_size is nan"),
        ({"hidden_size": float("inf")}, "hidden_size is inf"),
    ],
)
def test_values_of_another_kind_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        check_config(config)
    with pytest.raises(ModelLoadError, match=message.replace("config.json", "params.json")):
        check_config(config, file="params.json")


def test_what_no_size_is_may_be_anything() -> None:
    check_config({"architectures": None, "model_type": None, "rope_theta": 1e300, "eps": float("inf"), "a": ["b", {}]})
    check_config({"hidden_size": 64.0, "hidden_sizes": "many"})


def test_a_config_is_as_deep_and_as_large_as_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def nested(depth: int) -> dict[str, Any]:
        config: dict[str, Any] = {"a": 1}
        for _ in range(depth - 1):
            config = {"a": config}
        return config

    assert (config_bounds.MAX_DEPTH, config_bounds.MAX_VALUES) == (32, 1_000_000)
    check_config(nested(32))
    with pytest.raises(ModelLoadError, match="nested more than 32 levels deep"):
        check_config(nested(33))
    monkeypatch.setattr(config_bounds, "MAX_VALUES", 10)
    check_config({"a": [0] * 9})
    with pytest.raises(ModelLoadError, match="has more than 10 values"):
        check_config({"a": [0] * 10})


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(ModelLoadError) as caught:
        check_config({"model_type": ["x" * 500]})
    assert caught.value.message == f"model_type is ['{'x' * 198}… in config.json, must be a name"
    assert config_bounds._shown("x" * 198) == repr("x" * 198)


# Files.


def checkpoint_of(directory: Path, **more: Any) -> Checkpoint:
    fields: dict[str, Any] = {"config": {}, "generation_config": None, "generation_config_json": ""}
    return Checkpoint(directory=directory, **{**fields, **more})


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (None, {}, None, []),
        ({"eos_token_id": [5, 3]}, {"eos_token_id": 4}, 3, [3, 4, 5]),
        ({}, {"eos_token_id": [9]}, None, [9]),
        ({"eos_token_id": None}, {"eos_token_id": "no"}, 0, [0]),
    ],
)
def test_end_tokens_of_all_files_count_together(
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    tokenizer: int | None,
    expected: list[int],
    tmp_path: Path,
) -> None:
    found = checkpoint_of(tmp_path, generation_config=generation, config=config, tokenizer_eos_token_id=tokenizer)
    assert found.eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
    ],
)
def test_the_data_type_is_the_newer_field_s(config: dict[str, Any], name: str | None, tmp_path: Path) -> None:
    assert checkpoint_of(tmp_path, config=config).dtype_name == name


def test_weight_files_are_those_of_the_index_or_the_usual_one_or_all(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path)
    with pytest.raises(ModelLoadError, match=r"has no \*\.safetensors$"):
        found.weight_files()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"\(found pytorch_model.bin: pickled weights are not read\)"):
        found.weight_files()
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in found.weight_files()] == ["a.safetensors", "b.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert [path.name for path in found.weight_files()] == ["model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}))
    assert [path.name for path in found.weight_files()] == ["a.safetensors", "b.safetensors"]
    index.write_text(json.dumps({"weight_map": {"x": "c.safetensors", "y": "a.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"names files that are not there: c\.safetensors"):
        found.weight_files()
    for name in ("../a.safetensors", "", "..", 3, "sub/a.safetensors"):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ModelLoadError, match="must be files of the same directory"):
            found.weight_files()
    for text in ('{"weight_map": {}}', "{}", '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(ModelLoadError, match="has no weight_map"):
            found.weight_files()


def test_parts_of_a_gguf_file_come_in_their_order(tmp_path: Path) -> None:
    for name in ("m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "other.safetensors"):
        (tmp_path / name).touch()
    found = checkpoint_of(tmp_path, config={"quantization_config": {"quant_method": "gguf"}})
    assert [path.name for path in found.weight_files()] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


# Order of rows.


def test_pairs_of_a_rotation_become_halves_within_each_head() -> None:
    rows = torch.arange(12)[:, None].repeat(1, 2)
    assert in_halves(rows, 6)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert in_halves(torch.arange(4), 4).tolist() == [0, 2, 1, 3]


def test_mistral_s_queries_and_keys_are_of_whole_heads(tmp_path: Path) -> None:
    names = [f"layers.0.attention.{part}.weight" for part in ("wq", "wk", "wv")]
    save_file({name: torch.arange(32.0).reshape(8, 4) for name in names}, tmp_path / "consolidated.safetensors")
    (tmp_path / "config.json").write_text('{"head_dim": 4}')
    files = [tmp_path / "consolidated.safetensors"]
    assert not is_mistral(files)
    (tmp_path / "params.json").touch()
    assert is_mistral(files)
    assert not is_mistral([tmp_path / "model.safetensors"])
    with TensorFile(files[0]) as file:
        found = {name: StoredTensor(file, name, [8, 4], "F32") for name in names}
        renamed = mistral_tensors(found, tmp_path)
        prefix = "model.layers.0.self_attn"
        assert [tensor.paired_rows for tensor in renamed.values()] == [4, 4, 0]
        assert list(renamed) == [f"{prefix}.{part}_proj.weight" for part in "qkv"]
        assert renamed[f"{prefix}.q_proj.weight"].read()[:, 0].tolist() == [0, 8, 4, 12, 16, 24, 20, 28]
        assert renamed[f"{prefix}.v_proj.weight"].read()[:, 0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28]
        for head_dim in (0, 3, 6):
            (tmp_path / "config.json").write_text(json.dumps({"head_dim": head_dim}))
            with pytest.raises(ModelLoadError, match=f"8 rows, must be a multiple of the head size, {head_dim}"):
                mistral_tensors(found, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "size"), [("F64", 8), ("F32", 4), ("BF16", 2), ("F16", 2), ("I64", 8), ("U8", 1), ("F8_E4M3", 1)]
)
def test_a_tensor_s_bytes_are_those_of_its_type(dtype: str, size: int) -> None:
    assert StoredTensor(cast("Any", None), "x", [3, 5], dtype).num_bytes == 15 * size


def test_rows_are_put_in_the_parameter_s_order() -> None:
    plain = WeightSource(name="x", parameter="p")
    tensor = torch.arange(24.0).reshape(12, 2)
    assert in_order(tensor, plain) is tensor
    transposed = WeightSource(name="x", parameter="p", is_transposed=True)
    assert torch.equal(in_order(tensor, transposed), tensor.t())
    grouped = WeightSource(name="x", parameter="p", group_rows=(2, 1, 3))
    assert in_order(tensor, grouped)[:, 0].div(2).tolist() == [0, 1, 6, 7, 2, 8, 3, 4, 5, 9, 10, 11]
    row = WeightSource(name="x", parameter="p", is_row=True)
    assert in_order(torch.arange(3), row).tolist() == [[0, 1, 2]]


def test_a_rank_takes_its_rows_and_columns_of_each_part() -> None:
    sharding = cast("Any", Sharding([range(1, 3), range(6, 9)], range(1, 3)))
    held = torch.zeros(5, 2)
    for start, count in ((0, 4), (4, 3), (7, 3)):
        part = torch.arange(start, start + count, dtype=torch.float32)[:, None] * 10 + torch.arange(4.0)
        source = WeightSource(name="x", parameter="p", row_start=start, num_rows=count)
        copy_part(part, source, held, sharding, num_rows=10)
    assert held.tolist() == [[11, 12], [21, 22], [61, 62], [71, 72], [81, 82]]
    none = torch.ones(2)
    copy_part(
        torch.ones(3), WeightSource(name="x", parameter="p"), none, cast("Any", Sharding([], range(0))), num_rows=3
    )
    assert none.tolist() == [0, 0], "another rank has all of it"
    scalar = torch.zeros(())
    copy_part(torch.tensor(4.0), WeightSource(name="x", parameter="p"), scalar, sharding, num_rows=1)
    assert scalar.item() == 4


# What is missing.


def stored(name: str, shape: list[int], dtype: str = "F32") -> StoredTensor:
    return StoredTensor(cast("Any", None), name, shape, dtype)


def test_missing_and_unexpected_tensors_are_named_as_they_are_stored() -> None:
    names = WeightNames(
        sources=[WeightSource(name=name, parameter=name) for name in ("a.weight", "b.weight", "lm_head.weight")],
        prefixes=("model.", ""),
    )
    found: dict[str, Any] = {"a.weight": stored("model.a.weight", [1]), "c.weight": stored("model.c.weight", [1])}
    assert weights._problems(names, found) == [
        "missing tensors: model.b.weight, lm_head.weight",
        "unexpected tensors: model.c.weight",
    ]
    assert weights._some([str(number) for number in range(8)]) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert weights._some([str(number) for number in range(9)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 1 more"
    assert [weights._strip(name, ("model.", "transformer.")) for name in ("model.a", "transformer.b", "c")] == [
        "a",
        "b",
        "c",
    ]


def test_shapes_are_those_of_the_parameter_s_rows_as_they_are_stored() -> None:
    model = nn.Module()
    model.register_parameter("p", nn.Parameter(torch.empty(6, 4, device="meta")))
    sources = {
        "whole": (WeightSource(name="x", parameter="p"), [6, 4]),
        "part": (WeightSource(name="x", parameter="p", row_start=2, num_rows=3), [3, 4]),
        "transposed": (WeightSource(name="x", parameter="p", num_rows=3, is_transposed=True), [4, 3]),
        "row": (WeightSource(name="x", parameter="p", num_rows=1, is_row=True), [4]),
    }
    for source, shape in sources.values():
        names = WeightNames(sources=[source], prefixes=("",))
        weights._check_shapes(cast("Any", model), names, {"x": stored("x", shape)})
        with pytest.raises(ModelLoadError, match=r"tensors do not fit config\.json: x has shape"):
            weights._check_shapes(cast("Any", model), names, {"x": stored("x", [*shape[:-1], shape[-1] + 1])})


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8"])
def test_small_numbers_need_their_scales(dtype: str) -> None:
    names = WeightNames(sources=[WeightSource(name="x", parameter="p")], prefixes=("",))
    weights._check_types(names, {"x": stored("x", [1], "BF16")})
    with pytest.raises(ModelLoadError, match=f"x is {dtype} without the scale"):
        weights._check_types(names, {"x": stored("x", [1], dtype)})


# Memory.


def test_buffers_are_whole_grains_and_no_more_than_four_times_too_large() -> None:
    assert (GRAIN, MAX_KEPT_BYTES, MOST_TIMES_TOO_LARGE) == (1 << 16, 64 << 20, 4)
    buffers = ReadBuffers()
    taken = {size: buffers.take(size) for size in (0, 1, GRAIN, GRAIN + 1)}
    assert [tensor.untyped_storage().nbytes() for tensor in taken.values()] == [GRAIN, GRAIN, GRAIN, 2 * GRAIN]
    assert [tensor.numel() for tensor in taken.values()] == [0, 1, GRAIN, GRAIN + 1]
    large = buffers.take(9 * GRAIN)
    place = large.data_ptr()
    buffers.give_back(large)
    assert buffers.take(2 * GRAIN - 1).data_ptr() != place, "nine grains are more than four times as much, and one"
    assert buffers.take(2 * GRAIN).data_ptr() == place


def test_the_smallest_buffer_that_fits_is_used_again() -> None:
    buffers = ReadBuffers()
    sizes = (4, 2, 3)
    taken = [buffers.take(size * GRAIN) for size in sizes]
    places = {size: tensor.data_ptr() for size, tensor in zip(sizes, taken, strict=True)}
    for tensor in taken:
        buffers.give_back(tensor)
        buffers.give_back(tensor)
    assert [buffers.take(size * GRAIN).data_ptr() for size in (2, 2, 4)] == [places[2], places[3], places[4]]


# What caches are made for.


def loaded_of(model: Any, **more: Any) -> LoadedModel:
    config = EngineConfig(
        cache=CacheConfig(block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=3),
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
    )
    fields: dict[str, Any] = {
        "model": model,
        "config": config,
        "max_model_len": 64,
        "weight_bytes": LARGE_MODEL_BYTES,
        "dtype": torch.bfloat16,
        "cache_dtype": torch.int8,
        "device": torch.device("cpu"),
        "layout": plain_layout(2),
    }
    return LoadedModel(**{**fields, **more})


def test_a_cache_and_states_are_as_the_config_wants_them() -> None:
    layers = [AttentionLayer(num_heads=2, num_kv_heads=1, head_dim=4, scale=1.0)] * 2
    recurrent = [RecurrentLayer(tensors=(StateTensor((3, 2)),))]
    loaded = loaded_of(SimpleNamespace(attention_layers=layers, recurrent_layers=recurrent))
    cache = loaded.make_cache(num_blocks=5, num_cpu_blocks=4)
    assert (cache.num_blocks, cache.num_cpu_blocks, cache.block_size) == (5, 4, 8)
    assert (cache.k_caches[0].dtype, len(cache.k_caches), cache.memory_ahead._is_early) == (torch.int8, 2, True)
    assert loaded.make_cache(num_blocks=5).num_cpu_blocks == 0
    assert not loaded_of(loaded.model, weight_bytes=LARGE_MODEL_BYTES - 1).is_large
    states = loaded.make_states(num_snapshots=7, num_cpu_snapshots=6)
    assert states is not None
    assert (states.num_slots, states.num_snapshots, states.num_cpu_snapshots) == (3, 7, 6)
    assert (states.tensors[0][0].shape, states.tensors[0][0].dtype) == ((3 * 3 + 7, 3, 2), torch.bfloat16)
    fewer = loaded.make_states(num_snapshots=0, num_slots=2)
    assert fewer is not None
    assert (fewer.num_slots, fewer.tensors[0][0].shape[0]) == (2, 6)
    assert loaded_of(SimpleNamespace(attention_layers=layers, recurrent_layers=[])).make_states(num_snapshots=1) is None
