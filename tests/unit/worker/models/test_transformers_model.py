"""Modules of transformers as a Model: matrices in every form, ranks, sleep, and sentences for what cannot run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_kernels.moe.experts import RoutedExperts, mixture_reference
from pagoda_kernels.native.library import native
from pagoda_worker.loader.build import ModelBuilder
from pagoda_worker.models.linear_method import PLAIN
from pagoda_worker.models.model import BuildConfig
from pagoda_worker.models.transformers_model.hosted_experts import HostedExperts, find_activation
from pagoda_worker.models.transformers_model.hosted_layers import HostedLinear, hosted_linears
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel
from pagoda_worker.worker import Worker
from tests.checkpoints import make_checkpoint
from tests.models.sweep import make_model, make_prompts
from tests.unit.worker.driver import Driver
from tests.unit.worker.quantization.quantized_checkpoints import quantize_checkpoint

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def helium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A type that only transformers has."""
    directory = tmp_path_factory.mktemp("helium")
    make_model("helium", directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A type that both have."""
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama", directory)
    return directory


def tokens(driver: Driver) -> list[list[int]]:
    return [sequence.output for sequence in driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=40)]


def linears(driver: Driver) -> list[HostedLinear]:
    model = driver.worker._model
    assert model is not None
    return [layer for _, layer in hosted_linears(model)]


def test_both_implementations_say_the_same(llama: Path) -> None:
    ours, theirs = Driver(llama), Driver(llama, model_impl="transformers")
    assert tokens(theirs) == tokens(ours)
    assert theirs.facts == ours.facts


@pytest.mark.parametrize("quantization", ["int8", "int4-g32"])
def test_both_implementations_say_the_same_with_integers(llama: Path, quantization: str) -> None:
    ours = Driver(llama, quantization=quantization)
    theirs = Driver(llama, quantization=quantization, model_impl="transformers")
    assert all(layer.weight_scale is not None for layer in linears(theirs))
    assert tokens(theirs) == tokens(ours)


def test_matrices_in_bfloat16_are_held_as_kernels_want_them(llama: Path) -> None:
    theirs = Driver(llama, dtype="bfloat16", model_impl="transformers")
    if native("packed_linear") is None:
        pytest.skip("this CPU has no AVX512-BF16, or this machine no compiler")
    assert all(layer.method is not PLAIN for layer in linears(theirs))
    exact, rounded = tokens(Driver(llama)), tokens(theirs)
    assert [output[0] for output in rounded] == [output[0] for output in exact]


@pytest.mark.parametrize("kv_cache_dtype", ["int8"])
def test_a_quantized_cache_serves(llama: Path, kv_cache_dtype: str) -> None:
    ours = Driver(llama, kv_cache_dtype=kv_cache_dtype)
    assert tokens(Driver(llama, kv_cache_dtype=kv_cache_dtype, model_impl="transformers")) == tokens(ours)


def test_two_ranks_say_the_same(helium: Path) -> None:
    assert tokens(Driver(helium, world_size=2)) == tokens(Driver(helium))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "olmo2", "gpt_oss"])
def test_two_ranks_say_the_same_by_the_plan_of_a_module(model_type: str, tmp_path: Path) -> None:
    """Latents and experts; norms over all heads; sinks."""
    make_model(model_type, tmp_path)
    alone = tokens(Driver(tmp_path, model_impl="transformers"))
    assert tokens(Driver(tmp_path, model_impl="transformers", world_size=2)) == alone


MIXTURES = ["glm4_moe", "deepseek_v2", "deepseek_v3", "minimax_m2", "ernie4_5_moe"]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_the_experts_of_a_module_are_one_kernel(model_type: str, quantization: str | None, tmp_path: Path) -> None:
    make_model(model_type, tmp_path)
    options = {} if quantization is None else {"quantization": quantization}
    driver = Driver(tmp_path, dtype="bfloat16", model_impl="transformers", **options)
    if native("mixture_of_experts") is None:
        pytest.skip("this CPU has no AVX512-BF16, or this machine no compiler")
    tokens(driver)
    model = driver.worker._model
    assert model is not None
    mixtures = [module for module in model.modules() if isinstance(module, HostedExperts)]
    assert mixtures
    for module in mixtures:
        assert isinstance(module._kernel, RoutedExperts)
        count = len(module.experts)
        x = torch.randn(9, module.experts[0]["up"].columns).bfloat16()  # type: ignore[index]  # a ModuleDict
        chosen = torch.stack([torch.randperm(count)[:2] for _ in range(9)])
        chosen[4, 1] = count  # a choice of nothing
        weights = torch.rand(9, 2)
        expected = mixture_reference(x, weights, chosen, module._each())
        error = module(x, chosen, weights).float() - expected
        assert float(error.norm()) < 0.02 * float(expected.norm())


def test_an_activation_is_known_by_what_it_computes() -> None:
    class Module:
        limit = 1e4

        def _apply_gate(self, values: torch.Tensor) -> torch.Tensor:
            gate, up = values.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up

    class Interleaved:
        def _apply_gate(self, values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(values[..., ::2]) * values[..., 1::2]

    without_limit = Module()
    without_limit.limit = float("inf")
    assert find_activation(without_limit) == "silu"
    assert find_activation(Module()) is None
    assert find_activation(Interleaved()) is None
    assert find_activation(object()) is None


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_quantized_checkpoints_say_the_same_in_both_implementations(method: str, tmp_path: Path) -> None:
    source = make_checkpoint("LlamaForCausalLM", tmp_path / "floats", intermediate_size=128)
    for name in ("quantized", "twin"):
        (tmp_path / name).mkdir()
    quantize_checkpoint(source, tmp_path / "quantized", tmp_path / "twin", method=method)
    theirs = Driver(tmp_path / "quantized", model_impl="transformers")
    assert all(layer.weight_scale is not None for layer in linears(theirs) if "lm_head" not in layer.prefix)
    assert tokens(theirs) == tokens(Driver(tmp_path / "quantized"))


def test_two_ranks_of_both_implementations_say_the_same_with_integers(llama: Path) -> None:
    ours = Driver(llama, world_size=2, quantization="int8")
    assert tokens(Driver(llama, world_size=2, quantization="int8", model_impl="transformers")) == tokens(ours)


def test_ranks_that_cannot_share_a_projection_are_refused(helium: Path) -> None:
    config = json.loads((helium / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"world_size is 5, must divide the 64 values of model\.layers\.0"):
        builder(config, TensorParallel(rank=0, world_size=5)).build()


def test_it_sleeps_and_wakes_up(helium: Path) -> None:
    driver = Driver(helium)
    before = tokens(driver)
    for level in (1, 2):
        driver.worker.sleep(level)
        driver.worker.wake_up()
        driver.worker.initialize_cache(num_blocks=600, num_cpu_blocks=4)
        driver._free, driver._to_free = list(range(600)), []
        assert tokens(driver) == before


def test_dummy_weights_serve(helium: Path) -> None:
    driver = Driver(helium, load_format="dummy")
    assert all(len(output) == NUM_TOKENS for output in tokens(driver))


def test_a_checkpoint_of_other_options_does_not_fit(helium: Path, llama: Path) -> None:
    driver = Driver(helium)
    from pagoda_common.config.checkpoint.weights_source import WeightsSource

    with pytest.raises(ModelLoadError, match="is of another model: architecture is 'LlamaForCausalLM'"):
        driver.worker.prepare_weights(WeightsSource(model=str(llama)), lambda loaded, total: None)


def test_a_buffer_that_a_checkpoint_leaves_out_has_the_module_s_own_values(tmp_path: Path) -> None:
    """Corrections of the router's scores are a persistent buffer: zeros in a new module."""
    make_model("deepseek_v3", tmp_path)
    file, name = tmp_path / "model.safetensors", "e_score_correction_bias"
    tensors = load_file(file)
    left = {key: tensor for key, tensor in tensors.items() if not key.endswith(name)}
    assert len(left) < len(tensors)
    save_file(left, file, metadata={"format": "pt"})
    worker = Driver(tmp_path, model_impl="transformers", num_blocks=8).worker
    assert isinstance(worker, Worker)
    model = worker._model
    assert model is not None
    loaded = {key: value for key, value in model.named_parameters() if key.endswith(name)}
    assert len(loaded) == len(tensors) - len(left)
    assert all(not value.any() for value in loaded.values())


def builder(config: dict[str, Any], parallel: TensorParallel = ALONE) -> ModelBuilder:
    engine = ModelConfig(model_impl="transformers")
    return ModelBuilder(config=BuildConfig(checkpoint=config, engine=engine), parallel=parallel)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba2"}, "it has recurrent layers"),
        ({"model_type": "unheard_of"}, "does not know model_type 'unheard_of'"),
        ({"model_type": "t5"}, "has no causal language model of model_type 't5'"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "it is an encoder and a decoder"),
        (
            {"model_type": "llama", "architectures": ["LlamaForQuestionAnswering"]},
            "of model_type 'llama' is LlamaForCausalLM",
        ),
        ({"model_type": "gpt_neo"}, "its attention does not go through transformers' AttentionInterface"),
        ({"model_type": "bert", "num_hidden_layers": 1}, "its attention is not causal"),
        ({"model_type": "jetmoe", "num_hidden_layers": 1}, "its JetMoeParallelExperts cannot run on the meta device"),
        ({"model_type": "prophetnet"}, "its ProphetNetPositionalEmbeddings needs inputs other than token ids"),
    ],
)
def test_what_cannot_run_is_said_in_a_sentence(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        builder(config).build()
    assert reason in raised.value.message
    assert len(raised.value.message) < 200


def test_a_module_that_reads_a_matrix_itself_has_it_as_it_is_stored(helium: Path) -> None:
    config = json.loads((helium / "config.json").read_text())
    model = builder(config).build()
    layer = next(layer for _, layer in hosted_linears(model))
    assert layer.is_multiplied
    from pagoda_worker.models.transformers_model.attention import CURRENT, Probe

    CURRENT.running = Probe(torch.arange(2))
    try:
        assert layer.weight.dim() == 2
    finally:
        CURRENT.running = None
    assert not layer.is_multiplied


def test_sequences_end_where_rotations_would_depend_on_the_batch(helium: Path) -> None:
    config = json.loads((helium / "config.json").read_text())
    assert builder(config).build().max_position_embeddings == 512
    factors = [1.0] * (config["head_dim"] // 2)
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 128,
    }
    assert builder(config).build().max_position_embeddings == 128
