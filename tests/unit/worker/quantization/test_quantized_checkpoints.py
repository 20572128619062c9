"""Quantized checkpoints give the log probabilities of the floats that their integers stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.errors import ModelLoadError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.linear.quantized_linear import multiplies_integers
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader.formats.choose import stored_format
from pagoda_worker.models.layers import Matrix
from pagoda_worker.models.quantized_method import QuantizedLinearMethod
from tests.checkpoints import make_checkpoint
from tests.small_models.sizes import VOCAB_SIZE
from tests.unit.worker.driver import Driver
from tests.unit.worker.quantization.quantized_checkpoints import quantize_checkpoint

PROMPT = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), intermediate_size=128)


def served_logprobs(driver: Driver) -> torch.Tensor:
    """[len(PROMPT) - 1] of each token of the prompt but the first."""
    (sequence,) = driver.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), max_tokens=1
    )
    return torch.cat([torch.as_tensor(chunk.logprobs.logprobs) for chunk in sequence.prompt_logprobs])


def expected_logprobs(directory: Path) -> torch.Tensor:
    """The same of transformers, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    return rows[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]


def matrices(driver: Driver) -> dict[str, Matrix]:
    modules = driver.worker._model.modules()
    return {module.prefix: module for module in modules if isinstance(module, Matrix)}


def assert_served_as(quantized: Path, twin: Path, **options: Any) -> Driver:
    driver = Driver(quantized, **options)
    torch.testing.assert_close(served_logprobs(driver), expected_logprobs(twin), atol=TOLERANCE, rtol=0)
    return driver


@pytest.mark.parametrize(
    "options",
    [
        {"method": "gptq"},
        {"method": "gptq", "bits": 8, "group_size": 64},
        {"method": "gptq", "is_symmetric": False},
        {"method": "gptq", "bits": 8, "is_symmetric": False, "group_size": -1},
        {"method": "gptq", "is_symmetric": False, "checkpoint_format": "gptq_v2"},
        {"method": "gptq", "bits": 3, "is_symmetric": False},
        {"method": "gptq", "bits": 2, "group_size": 64, "checkpoint_format": "gptq_v2"},
        {"method": "awq", "is_symmetric": False},
        {"method": "awq", "is_symmetric": False, "checkpoint_format": "gemv"},
        {"method": "awq", "group_size": 64},
        {"method": "compressed-tensors"},
        {"method": "compressed-tensors", "bits": 8, "group_size": -1},
        {"method": "compressed-tensors", "is_symmetric": False},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_integers_are_served_as_the_floats_they_stand_for(llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    quantize_checkpoint(llama, tmp_path / "quantized", tmp_path / "twin", **options)
    driver = assert_served_as(tmp_path / "quantized", tmp_path / "twin")
    layers = matrices(driver)
    assert isinstance(layers["layers.1.attention.qkv_proj"].method, QuantizedLinearMethod)
    assert not isinstance(layers["lm_head"].method, QuantizedLinearMethod)
    assert driver.facts.quantization == options["method"]
    assert driver.facts.weight_bytes == sum(
        parameter.numel() * parameter.element_size() for parameter in driver.worker._model.parameters()
    )
    assert driver.facts.weight_bytes < 4 * driver.facts.num_parameters


def test_padding_of_packed_inputs_is_cut_off_and_zero_points_of_nothing_are_none() -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    groups = {"0": {"weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    found = stored_format({"quantization_config": config})
    assert found is not None
    matrix = (
        found[1]
        .of("model.layers.0.mlp.up_proj.weight")
        .read(
            {
                "weight_packed": torch.tensor([[0x76543210], [0x01234567]], dtype=torch.int32),
                "weight_scale": torch.ones(2, 1),
                "weight_shape": torch.tensor([2, 5]),
                "weight_zero_point": torch.tensor([[0], [0]], dtype=torch.int8),
            }
        )
    )
    assert isinstance(matrix, QuantizedMatrix)
    assert matrix.numbers.tolist() == [[-8, -7, -6, -5, -4], [-1, -2, -3, -4, -5]]
    assert (matrix.group_size, matrix.zeros) == (5, None)


@pytest.mark.parametrize(
    "architecture", ["GPT2LMHeadModel", "Qwen2ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"]
)
def test_fused_and_transposed_projections_are_put_together(architecture: str, tmp_path: Path) -> None:
    size = {} if architecture == "GPT2LMHeadModel" else {"intermediate_size": 128}
    source = make_checkpoint(architecture, tmp_path / "source", **size)
    quantize_checkpoint(source, tmp_path / "quantized", tmp_path / "twin", method="gptq", ignored=("experts",))
    assert_served_as(tmp_path / "quantized", tmp_path / "twin")


def test_layers_that_stay_floats_and_groups_by_activation_are_held_as_floats(llama: Path, tmp_path: Path) -> None:
    quantize_checkpoint(
        llama,
        tmp_path / "quantized",
        tmp_path / "twin",
        method="gptq",
        is_reordered=True,
        ignored=("layers.0", "up_proj"),
    )
    driver = assert_served_as(tmp_path / "quantized", tmp_path / "twin")
    assert not any(isinstance(layer.method, QuantizedLinearMethod) for layer in matrices(driver).values())


def test_where_there_is_no_kernel_integers_are_held_as_floats(llama: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama, tmp_path / "quantized", tmp_path / "twin", method="awq")
    driver = assert_served_as(tmp_path / "quantized", tmp_path / "twin", reference_kernels=("quantized_linear",))
    assert driver.facts.weight_bytes == 4 * driver.facts.num_parameters


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_errs_as_it_does_with_floats(llama: Path, tmp_path: Path, dtype: str) -> None:
    quantize_checkpoint(llama, tmp_path / "quantized", tmp_path / "twin", method="gptq")
    wide = served_logprobs(Driver(tmp_path / "quantized"))
    errors = [
        float((served_logprobs(Driver(tmp_path / name, dtype=dtype, **options)) - wide).abs().mean())
        for name, options in (("quantized", {"activation_quantization": "none"}), ("quantized", {}), ("twin", {}))
    ]
    weights_only, default, floats = errors
    assert weights_only < 2 * floats + 0.01
    assert default < 6 * floats + 0.01
    assert (default != weights_only) == (dtype == "bfloat16" and multiplies_integers())


def test_two_ranks_share_the_integers(llama: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama, tmp_path / "quantized", tmp_path / "twin", method="awq", is_symmetric=False)
    torch.testing.assert_close(
        served_logprobs(Driver(tmp_path / "quantized", world_size=2)),
        expected_logprobs(tmp_path / "twin"),
        atol=TOLERANCE,
        rtol=0,
    )


def test_gptq_has_bits_and_groups_by_pattern(llama: Path, tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: the first pattern that matches counts, "-:" leaves layers out."""
    quantize_checkpoint(llama, tmp_path / "four", tmp_path / "four_twin", method="gptq", ignored=("layers.2", "mlp"))
    quantize_checkpoint(llama, tmp_path / "eight", tmp_path / "eight_twin", method="gptq", bits=8, group_size=64)
    for kind in ("", "_twin"):
        four, eight = (load_file(tmp_path / f"{name}{kind}" / "model.safetensors") for name in ("four", "eight"))
        is_eight = {name for name in eight if ".mlp." in name and "layers.2" not in name}
        kept = {name: tensor for name, tensor in four.items() if ".mlp." not in name or "layers.2" in name}
        both = kept | {name: eight[name] for name in is_eight}
        save_file(both, tmp_path / f"four{kind}" / "model.safetensors", metadata={"format": "pt"})
    rules = {r"-:.*\.layers\.2\..*": {}, r"+:.*\.mlp\..*": {"bits": 8, "group_size": 64}}
    driver = assert_served_as(changed(tmp_path / "four", dynamic=rules), tmp_path / "four_twin")
    held = {name for name, layer in matrices(driver).items() if isinstance(layer.method, QuantizedLinearMethod)}
    assert held == {name for name in matrices(driver) if name.startswith(("layers.0", "layers.1"))}


def changed(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | changes
    path.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("gptq", {"quant_method": "aqlm"}, "quantized with 'aqlm', must be one of awq, gptq"),
        ("gptq", {"bits": 5}, "quantization_config.bits is 5, must be one of 2, 3, 4, 8"),
        ("gptq", {"group_size": 0}, "quantization_config.group_size is 0, must be -1 or at least 1"),
        ("gptq", {"group_size": 16}, "q_proj.qweight cannot be read: 2 groups of scales for 64 inputs, must be 4"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("awq", {"version": "marlin"}, "quantization_config.version is 'marlin', must be one of 'gemm', 'gemv'"),
        ("compressed-tensors", {"format": "marlin-24"}, "format is 'marlin-24'"),
        ("compressed-tensors", {"config_groups": {}}, "config_groups is {}, must be at least one object by name"),
    ],
)
def test_what_cannot_be_read_is_named(
    llama: Path, tmp_path: Path, method: str, changes: dict[str, Any], message: str
) -> None:
    quantize_checkpoint(llama, tmp_path / "quantized", tmp_path / "twin", method=method)
    with pytest.raises(ModelLoadError, match=message.replace(".", r"\.")):
        Driver(changed(tmp_path / "quantized", **changes))


def test_the_flag_must_agree_with_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama, tmp_path / "quantized", tmp_path / "twin", method="gptq")
    assert Driver(tmp_path / "quantized", quantization="gptq_marlin").facts.quantization == "gptq"
    with pytest.raises(
        ModelLoadError, match=r"quantization is 'awq', the weights of .* are quantized with gptq already"
    ):
        Driver(tmp_path / "quantized", quantization="awq")
    with pytest.raises(
        ModelLoadError, match=r"quantization is 'int4', the weights of .* are quantized with gptq already"
    ):
        Driver(tmp_path / "quantized", quantization="int4")
    with pytest.raises(ModelLoadError, match=r"quantization is 'gptq', the weights of .* are floats"):
        Driver(llama, quantization="gptq")


def test_a_checkpoint_that_only_says_so_is_refused(llama: Path, tmp_path: Path) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match="has a quantization_config, but no tensor is quantized"):
        Driver(changed(tmp_path, quant_method="awq", bits=4, group_size=32))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_makes_keys_of_latents_is_held_as_floats(method: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
    source = make_checkpoint("DeepseekV3ForCausalLM", tmp_path / "source", moe_intermediate_size=32, **sizes)
    quantize_checkpoint(source, tmp_path / "q", tmp_path / "twin", method=method, is_symmetric=method == "gptq")
    driver = assert_served_as(tmp_path / "q", tmp_path / "twin")
    ups = [matrix for prefix, matrix in matrices(driver).items() if prefix.endswith(".kv_up")]
    assert [matrix.weight.dtype for matrix in ups] == [torch.float32] * 2
