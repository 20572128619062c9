"""Llama-Nemotron: what config.json may say, layers without attention, and KV heads that differ from layer to layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_common.errors import ModelLoadError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.native.library import load_native, native
from pagoda_worker.models.registry import FAMILIES, family_of
from pagoda_worker.models.spec import DecoderSpec
from tests import deci_lm
from tests.checkpoints import CONFIGS, make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import greedy_with_logprobs, make_prompts

load_native()
ARCHITECTURE = "DeciLMForCausalLM"
NUM_TOKENS = 12
LENGTHS = (1, 15, 17, 100, 300)
WHOLE: dict[str, Any] = {
    "attention": {
        "n_heads_in_group": 8,
        "no_op": False,
        "num_sink_tokens": None,
        "replace_with_linear": False,
        "sparsify": None,
        "unshifted_sink": False,
        "use_prefill_window_in_sink_attention": False,
        "window_length": None,
    },
    "ffn": {"ffn_mult": 2.625, "no_op": False, "replace_with_linear": False, "sparsify": None},
}
"""A layer as published."""


def block(attention: dict[str, Any] | None = None, ffn: dict[str, Any] | None = None) -> dict[str, Any]:
    """A layer with other options."""
    return {"attention": WHOLE["attention"] | (attention or {}), "ffn": WHOLE["ffn"] | (ffn or {})}


PUBLISHED: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
    "block_configs": [
        block(),
        block({"n_heads_in_group": None, "no_op": True}, {"ffn_mult": 1.3125}),
        block({"n_heads_in_group": None, "replace_with_linear": True}, {"ffn_mult": 0.5}),
        block({"n_heads_in_group": 32}, {"ffn_mult": None, "no_op": True}),
        block({"n_heads_in_group": 16}, {"ffn_mult": None, "replace_with_linear": True}),
    ],
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 8192,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "nemotron-nas",
    "num_attention_heads": 64,
    "num_hidden_layers": 5,
    "num_key_value_heads": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
"""As of Llama-3_3-Nemotron-Super-49B, with fewer layers, one of each kind."""


def test_the_published_config() -> None:
    spec = family_of(PUBLISHED).spec(PUBLISHED)
    assert spec.mixers == ("attention", "none", "linear", "attention", "attention")
    assert spec.feed_forwards == (True, True, True, False, True)
    assert [spec.keeps_tokens(layer) for layer in range(5)] == [True, False, False, True, True]
    assert [spec.layer_sizes[layer].num_kv_heads for layer in (0, 3, 4)] == [8, 2, 4]
    assert [spec.layer_sizes[layer].intermediate_size for layer in (0, 1, 2)] == [14336, 7168, 2816]
    assert [one.is_linear for one in spec.layer_sizes] == [False] * 4 + [True]
    assert spec.rope is not None
    assert (spec.rope.rope_type, spec.rope.theta) == ("llama3", 500000.0)


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 1.3125, 2.625, 3.28125, 4.875, 5.25])
@pytest.mark.parametrize("hidden_size", [48, 4096, 8192, 16384])
def test_widths_of_feed_forwards(factor: float, hidden_size: int) -> None:
    config = PUBLISHED | {"hidden_size": hidden_size, "num_attention_heads": 8}
    config |= {"num_hidden_layers": 1, "block_configs": [block(ffn={"ffn_mult": factor})]}
    width = FAMILIES[ARCHITECTURE].spec(config).layer_sizes[0].intermediate_size
    assert width == max(256, deci_lm.intermediate_size(factor, hidden_size))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (block({"window_length": 8192}), r"block_configs\[1\]\.attention\.window_length is 8192"),
        (block({"num_sink_tokens": 4}), r"block_configs\[1\]\.attention\.num_sink_tokens is 4"),
        (block({"unshifted_sink": True}), r"block_configs\[1\]\.attention\.unshifted_sink is True"),
        (block({"sparsify": ["q"]}), r"block_configs\[1\]\.attention\.sparsify is \['q'\]"),
        (block({"mamba": {"state": 2}}), r"block_configs\[1\]\.attention\.mamba is"),
        (block(ffn={"sparsify": ["up"]}), r"block_configs\[1\]\.ffn\.sparsify is \['up'\]"),
        (block(ffn={"moe": {"num_experts": 2}}), r"block_configs\[1\]\.ffn\.moe is"),
        (block({"n_heads_in_group": 3}), r"n_heads_in_group is 3, must be a divisor of num_attention_heads, 64"),
        (block({"n_heads_in_group": 0}), r"n_heads_in_group is 0, must be a divisor"),
        (block({"n_heads_in_group": None}), r"n_heads_in_group is None, must be a divisor"),
        (block(ffn={"ffn_mult": None}), r"block_configs\[1\]\.ffn\.ffn_mult is None, must be a positive number"),
        (block(ffn={"ffn_mult": -1.0}), r"ffn_mult is -1.0, must be a positive number"),
        (block(ffn={"ffn_mult": float("inf")}), r"ffn_mult is inf, must be a positive number"),
        (block(ffn={"ffn_mult": 1e9}), r"ffn_mult is 1000000000.0, must be .* at most 1048576 columns"),
        ({"attention": WHOLE["attention"]}, r"block_configs\[1\]\.ffn is None, must be an object"),
        ({"attention": [], "ffn": {}}, r"block_configs\[1\]\.attention is \[\], must be an object"),
        (block() | {"parallel_blocks": [1]}, r"block_configs\[1\]\.parallel_blocks is \[1\]"),
        (7, r"block_configs\[1\] is 7, must be an object"),
    ],
)
def test_what_would_compute_something_else_is_refused(changed: Any, message: str) -> None:
    blocks = [changed if layer == 1 else one for layer, one in enumerate(PUBLISHED["block_configs"])]
    with pytest.raises(ModelLoadError, match=message):
        FAMILIES[ARCHITECTURE].spec(PUBLISHED | {"block_configs": blocks})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hidden_layers": 6}, "block_configs has 5 entries for 6 layers"),
        ({"block_configs": {}}, "block_configs has {} entries for 5 layers"),
        ({"block_configs": [block({"no_op": True})] * 5}, "block_configs has no layer with attention"),
        ({"block_configs": None, "num_key_value_heads_per_layer": [8]}, "per_layer has 1 entries for 5 layers"),
        (
            {"block_configs": None, "num_key_value_heads_per_layer": [8, 4, 4, 3, 1]},
            r"num_key_value_heads_per_layer\[3\] is 3, must be a divisor of num_attention_heads, 64",
        ),
    ],
)
def test_layers_that_are_not_described_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        FAMILIES[ARCHITECTURE].spec(PUBLISHED | options)


BLOCKS = CONFIGS[ARCHITECTURE][1]["block_configs"]
FORMS: dict[str, dict[str, Any]] = {
    "each part": {},
    "none in the first and last layers": {
        "block_configs": [BLOCKS[layer] for layer in (4, 3, 2, 1, 0, 4)],
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "DeciLM-7B": {
        "block_configs": None,
        "num_hidden_layers": 4,
        "num_key_value_heads_per_layer": [4, 1, 1, 2],
        "intermediate_size": 80,
    },
    "one count of KV heads": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": factor}}
            for factor in (1.0, 13.0, 22.0, 1.0, 13.0, 22.0)
        ],
    },
}


def _driver(directory: Path, options: dict[str, Any], **of_driver: Any) -> tuple[Driver, Any]:
    """A driver of a checkpoint, and the module that has written it."""
    from transformers import AutoModelForCausalLM

    make_checkpoint(ARCHITECTURE, directory, **options)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return Driver(directory, **of_driver), model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", [(), ("none",)], ids=["torch", "kernels"])
def test_prompts_of_every_length(form: str, kernels: tuple[str, ...], tmp_path: Path) -> None:
    """Tokens, and log probabilities within 1e-4, whole and in chunks, by PyTorch and by kernels."""
    driver, model = _driver(tmp_path, FORMS[form], reference_kernels=kernels)
    params = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)
    prompts = make_prompts(LENGTHS)
    for chunk in (10_000, 32):
        for one in driver.generate(prompts, params, max_tokens=NUM_TOKENS, chunk=chunk):
            tokens, rows = greedy_with_logprobs(model, one.prompt, one.output)
            assert one.output == tokens
            found = torch.tensor([entries[token] for token, entries in zip(tokens, one.logprobs, strict=True)])
            torch.testing.assert_close(found, rows.gather(1, torch.tensor(tokens)[:, None])[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", ["none in the first and last layers", "DeciLM-7B"])
def test_two_ranks(form: str, tmp_path: Path) -> None:
    """KV heads of some layers are shared out, one head of others is on both ranks."""
    driver, model = _driver(tmp_path, FORMS[form], world_size=2)
    for one in driver.generate(make_prompts(LENGTHS), max_tokens=NUM_TOKENS, chunk=100):
        assert one.output == greedy_with_logprobs(model, one.prompt, one.output)[0]


def test_layers_without_attention_keep_nothing(tmp_path: Path) -> None:
    driver, _ = _driver(tmp_path, {})
    (group,) = driver.groups
    assert group.layers == (0, 1, 2)  # of six layers, those that attend
    model = driver.worker._model
    assert model is not None
    assert [layer.num_kv_heads for layer in model.attention_layers] == [2, 1, 4]


def test_an_int8_cache_of_layers_with_different_heads(tmp_path: Path) -> None:
    """However a prompt is cut, and beside whatever others."""
    directory = make_checkpoint(ARCHITECTURE, tmp_path)
    driver, prompts = Driver(directory, kv_cache_dtype="int8"), make_prompts(LENGTHS)
    together = [one.output for one in driver.generate(prompts, max_tokens=NUM_TOKENS, chunk=40)]
    alone = [driver.generate([prompt], max_tokens=NUM_TOKENS)[0].output for prompt in prompts]
    assert together == alone


@pytest.mark.skipif(native("composed_layers") is None, reason="the C++ kernels are not compiled")
@pytest.mark.parametrize(("form", "is_fused"), [("one count of KV heads", True), ("DeciLM-7B", False)])
def test_one_call_computes_all_layers_where_their_heads_are_the_same(form: str, is_fused: bool, tmp_path: Path) -> None:
    """Their feed-forwards may differ. The tests above compare both forms with transformers."""
    driver, _ = _driver(tmp_path, FORMS[form])
    runner = driver.worker._runner
    assert runner is not None
    assert (runner.forward.fused is not None) == is_fused


@pytest.mark.skipif(native("decoder_layers") is None, reason="this CPU has no AVX512-BF16")
def test_one_call_gives_the_bits_of_modules_in_bfloat16(tmp_path: Path) -> None:
    """Feed-forwards of different widths, one after the other."""
    directory = make_checkpoint(ARCHITECTURE, tmp_path, **FORMS["one count of KV heads"])
    params = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)
    said = []
    for kernels in ((), ("decoder_layers",)):
        driver = Driver(directory, dtype="bfloat16", reference_kernels=kernels)
        sequences = driver.generate(make_prompts(LENGTHS), params, max_tokens=NUM_TOKENS, chunk=64)
        said.append([(one.output, one.logprobs) for one in sequences])
    assert said[0] == said[1]


def _changed(part: str, layer: int, **options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["block_configs"][layer][part].update(options)


SPOILT: dict[str, Callable[[dict[str, Any]], None]] = {
    "ffn_mult": _changed("ffn", 1, ffn_mult=1.0),
    "n_heads_in_group": _changed("attention", 2, n_heads_in_group=2),
    "no attention": _changed("attention", 2, no_op=True),
    "attention": _changed("attention", 1, no_op=False, n_heads_in_group=2),
    "no feed-forward": _changed("ffn", 1, no_op=True),
    "feed-forward": _changed("ffn", 2, no_op=False, ffn_mult=1.0),
    "linear attention": _changed("attention", 3, replace_with_linear=False, n_heads_in_group=2),
    "linear feed-forward": _changed("ffn", 5, replace_with_linear=False, ffn_mult=1.0),
}
"""Options as they should not be."""


@pytest.mark.parametrize("name", SPOILT)
def test_a_checkpoint_of_other_layers_is_refused(name: str, tmp_path: Path) -> None:
    """Each of these options says which tensors there are."""
    directory = make_checkpoint(ARCHITECTURE, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    Driver(directory)
    SPOILT[name](config)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"missing tensors|unexpected tensors|has shape"):
        Driver(directory)


def test_layers_that_are_the_same_may_be_described(tmp_path: Path) -> None:
    """A config without block_configs is Llama's."""
    config = {name: value for name, value in PUBLISHED.items() if name != "block_configs"}
    spec: DecoderSpec = FAMILIES[ARCHITECTURE].spec(config | {"num_key_value_heads": 8, "intermediate_size": 14336})
    assert set(spec.mixers) == {"attention"}
    assert {(one.num_kv_heads, one.intermediate_size) for one in spec.layer_sizes} == {(8, 14336)}
