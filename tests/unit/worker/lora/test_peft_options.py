"""What adapters may say: ranks, scales, modules, tables and heads, experts; and what is refused, by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.errors import ModelLoadError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.lora.add_lora import LoraPart
from pagoda_worker.lora.adapter import apart
from tests.checkpoints import make_checkpoint
from tests.peft_adapters import base_model, logprobs, make_adapter, merged
from tests.small_models.sizes import VOCAB_SIZE
from tests.unit.worker.driver import Driver
from tests.unit.worker.lora.peft_check import CONFIG, check, prompt_of

FAMILY = "LlamaForCausalLM"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(FAMILY, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def driver(checkpoint: Path) -> Driver:
    return Driver(checkpoint, lora=LoraConfig(enable_lora=True, max_loras=64, max_lora_rank=64), max_logprobs=-1)


OPTIONS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "r": 16},
    "patterns": {
        "target_modules": ["q_proj", "down_proj", "up_proj"],
        "rank_pattern": {"down_proj": 3, r"layers\.1\.self_attn\.q_proj": 24},
        "alpha_pattern": {"up_proj": 40},
    },
    "regex": {"target_modules": r".*\.layers\.[02]\.(self_attn\.v_proj|mlp\.gate_proj)"},
    "some layers": {"target_modules": ["k_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "table and head": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    **{name: {"target_modules": [name]} for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_as_peft_merges_it(name: str, checkpoint: Path, driver: Driver, tmp_path: Path) -> None:
    adapter = make_adapter(checkpoint, tmp_path / "adapter", **OPTIONS[name])
    number = 10 + list(OPTIONS).index(name)
    driver.load_adapter(number, adapter)
    check(driver, merged(checkpoint, adapter), number)


def test_a_batch_of_eight_adapters_and_none_is_as_each_alone(checkpoint: Path, driver: Driver, tmp_path: Path) -> None:
    numbers = [0]
    for seed in range(8):
        adapter = make_adapter(checkpoint, tmp_path / str(seed), seed=seed, r=2 << seed % 5)
        driver.load_adapter(40 + seed, adapter)
        numbers.append(40 + seed)
    prompts = [prompt_of(length, seed=length) for length in (5, 17, 33, 1, 40, 9, 64, 25, 12)]
    together = driver.generate(prompts, max_tokens=12, loras=numbers)
    alone = [
        driver.generate([prompt], max_tokens=12, loras=[number])[0]
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
    assert [one.output for one in together] == [one.output for one in alone]
    base = driver.generate(prompts, max_tokens=12)
    assert sum(one.output != other.output for one, other in zip(together, base, strict=True)) >= 5
    chunked = driver.generate(prompts, max_tokens=12, loras=numbers, chunk=7, budget=20)
    assert [one.output for one in chunked] == [one.output for one in alone]


def test_modules_that_are_not_to_be_changed_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    config = LoraConfig(enable_lora=True, lora_target_modules=("q_proj",))
    driver = Driver(checkpoint, lora=config, max_logprobs=-1)
    whole = make_adapter(checkpoint, tmp_path / "whole", target_modules=["q_proj", "o_proj"])
    tensors = {
        name: value for name, value in load_file(whole / "adapter_model.safetensors").items() if "q_proj" in name
    }
    part = tmp_path / "part"
    part.mkdir()
    save_file(tensors, part / "adapter_model.safetensors")
    given = json.loads((whole / "adapter_config.json").read_text()) | {"target_modules": ["q_proj"]}
    (part / "adapter_config.json").write_text(json.dumps(given))
    driver.load_adapter(1, whole)
    check(driver, merged(checkpoint, part), 1)


@pytest.mark.parametrize("world_size", [2])
def test_ranks_share_adapters(world_size: int, checkpoint: Path, tmp_path: Path) -> None:
    adapter = make_adapter(checkpoint, tmp_path / "adapter", target_modules="all-linear")
    driver = Driver(checkpoint, lora=CONFIG, max_logprobs=-1, world_size=world_size)
    driver.load_adapter(1, adapter)
    check(driver, merged(checkpoint, adapter), 1)
    check(driver, base_model(checkpoint), 0)


def test_an_adapter_lies_over_quantized_weights(checkpoint: Path, tmp_path: Path) -> None:
    adapter = make_adapter(checkpoint, tmp_path / "adapter")
    driver = Driver(checkpoint, lora=CONFIG, max_logprobs=-1, quantization="int8")
    driver.load_adapter(1, adapter)
    prompt = prompt_of(40)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    (done,) = driver.generate([prompt], params, max_tokens=1, loras=[1])
    found = torch.tensor([done.logprobs[0][token] for token in range(VOCAB_SIZE)])
    distance, from_base = (
        (found - logprobs(model, prompt)[-1]).abs().mean()
        for model in (merged(checkpoint, adapter), base_model(checkpoint))
    )
    assert distance < 0.3 * from_base


def test_parts_that_change_the_same_outputs_are_one() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [
        (torch.randn(rank, 20, generator=generator), torch.randn(rows, rank, generator=generator), start)
        for rank, rows, start in ((3, 50, 40), (8, 70, 0), (2, 10, 30), (4, 5, 200))
    ]
    parts = apart(LoraPart.of(*given) for given in matrices)
    assert [(part.row_start, part.num_rows, part.a.shape[0]) for part in parts] == [(0, 90, 13), (200, 5, 4)]
    expected = torch.zeros(205, 20)
    for a, b, start in matrices:
        expected[start : start + b.shape[0]] += b @ a
    found = torch.zeros(205, 20)
    for part in parts:
        found[part.row_start : part.row_start + part.num_rows] += part.matrix @ part.a
    torch.testing.assert_close(found, expected)


def spoil(adapter: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A copy with other fields and more tensors."""
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    given = json.loads((adapter / "adapter_config.json").read_text())
    (spoilt / "adapter_config.json").write_text(json.dumps(given | config))
    save_file(load_file(adapter / "adapter_model.safetensors") | tensors, spoilt / "adapter_model.safetensors")
    return spoilt


PLACE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"use_dora": True}, {}, "use_dora is True, which is not supported"),
        ({}, {f"{PLACE}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector cannot be used: DoRA"),
        ({}, {f"{PLACE}.base_layer.bias": torch.ones(64)}, "base_layer.bias cannot be used: biases of adapters"),
        ({"bias": "all"}, {}, "bias is 'all', which is not supported"),
        ({"lora_bias": True}, {f"{PLACE}.lora_B.bias": torch.ones(64)}, "lora_B.bias cannot be used: biases of ad"),
        ({}, {"base_model.model.model.embed_tokens.trainable_tokens_delta": torch.ones(2, 64)}, "trained tokens are"),
        ({}, {"base_model.model.lm_head.modules_to_save.weight": torch.ones(300, 64)}, "modules_to_save is not"),
        ({}, {f"{PLACE}.lora_A.weight": torch.ones(8, 60)}, "and its other half have shape"),
        ({}, {f"{PLACE}.lora_B.weight": torch.ones(60, 8)}, r"lora_B.weight has shape \[60, 8\], must be \[64, 8\]"),
        ({}, {f"{PLACE}x.lora_A.weight": torch.ones(8, 64)}, "q_projx.lora_A.weight has no other half"),
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3', must be 'LORA'"),
        ({"r": 0}, {}, r"r is 0, must be a number from 1 to 1e\+09"),
        ({"r": 10**10}, {}, "r is 10000000000, must be a number from 1"),
        ({"r": 10**400}, {}, "r is 10{199}…, must be a number from 1"),
        ({"lora_alpha": 10**400}, {}, "lora_alpha is 10{199}…, must be a number"),
        ({"lora_alpha": math.nan}, {}, "lora_alpha is nan, must be a number"),
        ({"lora_alpha": -math.inf}, {}, "lora_alpha is -inf, must be a number"),
        ({"rank_pattern": {"q_proj": 2**70}}, {}, "q_proj is 1180591620717411303424, must be a number"),
        ({"rank_pattern": {"q_proj": 0.5}}, {}, "rank_pattern must have whole numbers"),
        ({"rank_pattern": [1] * 1000}, {}, "rank_pattern is .*…, must be an object"),
        ({"rank_pattern": {f"a{number}+": 3 for number in range(5000)}}, {}, "5000 regular expressions, must be at mo"),
        ({"alpha_pattern": {"a" * 1000 + "+" * 25: 3}}, {}, "has 1025 characters, must have at most 1024"),
        (
            {"rank_pattern": {"a{99999999999}": 3}},
            {},
            "is not a regular expression: the repetition number is too large",
        ),
        ({"rank_pattern": {"(" * 500 + ")" * 500: 3}}, {}, "is not a regular expression"),
        ({"rank_pattern": {r"(.+.+)+\d": 3}}, {}, r"such as .*, take more than 2 s or 256 MiB to be searched"),
        ({}, {f"{PLACE}.lora_A.weight": torch.full((8, 64), math.nan)}, "numbers that are not finite"),
        ({"lora_alpha": 1e9}, {f"{PLACE}.lora_B.weight": torch.full((64, 8), 1e38)}, "numbers that are not finite"),
        ({}, {f"{PLACE}.lora_A.weight": torch.ones(8, 64, dtype=torch.int32)}, "must be a matrix of floats"),
        ({}, {f"{PLACE}.lora_A.weight": torch.ones(0, 64)}, "has rank 0, must be between 1 and max_lora_rank, 64"),
        ({}, {f"{PLACE}.lora_A.weight": torch.ones(100_000, 64)}, "has rank 100000, must be between 1 and max_lora_r"),
        ({"modules_to_save": ["a"] * 1000}, {}, "modules_to_save is .*…, which is not supported"),
        ({"lora_alpha": "much"}, {}, "lora_alpha is 'much', must be a number"),
        ({"rank_pattern": {"(": 3}}, {}, r"'\(' is not a regular expression"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    message: str,
    checkpoint: Path,
    driver: Driver,
    tmp_path: Path,
) -> None:
    adapter = make_adapter(checkpoint, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(ModelLoadError, match=message):
        driver.load_adapter(99, spoil(adapter, tmp_path, config, tensors))


def test_a_rank_above_the_bound_is_refused(checkpoint: Path, driver: Driver, tmp_path: Path) -> None:
    adapter = make_adapter(checkpoint, tmp_path / "adapter", target_modules=["q_proj"], r=65)
    with pytest.raises(ModelLoadError, match="has rank 65, must be between 1 and max_lora_rank, 64"):
        driver.load_adapter(99, adapter)


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("Qwen3MoeForCausalLM", "mlp"),
        ("MixtralForCausalLM", "mlp"),
        ("HunYuanMoEV1ForCausalLM", "mlp"),
        ("Llama4ForCausalLM", "feed_forward"),
        ("GptOssForCausalLM", "mlp"),
        ("GraniteMoeHybridForCausalLM", "block_sparse_moe"),
    ],
)
def test_experts_that_are_stacked_in_one_tensor_are_changed_one_by_one(family: str, place: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path / "model")
    adapter = make_adapter(
        checkpoint,
        tmp_path / "adapter",
        target_modules=["q_proj"],
        target_parameters=[f"{place}.experts.gate_up_proj", f"{place}.experts.down_proj"],
    )
    driver = Driver(checkpoint, lora=CONFIG, max_logprobs=-1)
    driver.load_adapter(1, adapter)
    check(driver, merged(checkpoint, adapter), 1)
    check(driver, base_model(checkpoint), 0)
