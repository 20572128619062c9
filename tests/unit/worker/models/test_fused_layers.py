"""All layers of a model in one call: which models have that, and that it computes what they compute, to the bit."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.decoder.composed_layers import ComposedLayers
from pagoda_kernels.decoder.decoder_layers import DecoderLayers, set_num_helpers
from pagoda_kernels.native.library import load_native, native
from pagoda_worker.worker import Worker
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver, Tracked
from tests.unit.worker.models.reference import make_prompts

load_native()
pytestmark = pytest.mark.skipif(native("composed_layers") is None, reason="this CPU has no AVX2, or no compiler")
needs_bf16 = pytest.mark.skipif(native("decoder_layers") is None, reason="this CPU has no AVX512-BF16")

LENGTHS = (1, 15, 16, 17, 70, 33)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
FUSED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",  # a sliding window
    "Qwen2ForCausalLM",  # biases
    "Qwen3ForCausalLM",  # norms of heads
    "GemmaForCausalLM",  # weights of norms less one, GELU
    "Phi3ForCausalLM",  # rotates a part of each head
    "SmolLM3ForCausalLM",  # a layer without rotation
    "Ernie4_5ForCausalLM",  # rotates neighbours
    "HunYuanDenseV1ForCausalLM",  # norms of rotated heads
)
NOT_FUSED = (
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "CohereForCausalLM",
    "ArceeForCausalLM",
)
MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "HunYuanMoEV1ForCausalLM")
"""In one call in bfloat16 alone."""


def fused_of(driver: Driver) -> DecoderLayers | ComposedLayers | None:
    runner = driver.worker._runner
    assert runner is not None
    return runner.forward.fused


def one_by_one(directory: Path, **options: Any) -> Driver:
    """A driver whose model runs its layers one after the other."""
    driver = Driver(directory, **options)
    runner = driver.worker._runner
    assert runner is not None
    runner.forward.fused = None
    return driver


def described(sequences: list[Tracked]) -> list[Any]:
    """All that was said about sequences."""
    prompts = [np.concatenate([chunk.logprobs.logprobs for chunk in one.prompt_logprobs] or [[]]) for one in sequences]
    return [(one.output, one.logprobs, prompt.tolist()) for one, prompt in zip(sequences, prompts, strict=True)]


def assert_alike(
    directory: Path,
    kind: type = DecoderLayers,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    chunk: int = 20,
    worker: Worker | None = None,
    **options: Any,
) -> None:
    """The same tokens, log probabilities and cache, with prompts in chunks beside decodes.

    Args:
        worker: of the layers in one call; None is one with one thread.
    """
    fused = Driver(directory, worker=worker, **options)
    plain = one_by_one(directory, **options)
    assert isinstance(fused_of(fused), kind)
    for params in (GREEDY, RANDOM, PARAMS):
        said = [described(driver.generate(make_prompts(lengths), params, chunk=chunk)) for driver in (fused, plain)]
        assert said[0] == said[1]
    caches = [driver.worker._runner._kv_cache for driver in (fused, plain) if driver.worker._runner is not None]
    for name in ("k_caches", "v_caches"):
        for ours, theirs in zip(*(getattr(cache, name) for cache in caches), strict=True):
            assert ours.any()
            assert torch.equal(ours, theirs)


@needs_bf16
@pytest.mark.parametrize("architecture", FUSED + MIXTURES)
def test_fused_layers_compute_as_the_layers_do(architecture: str, tmp_path: Path) -> None:
    assert_alike(make_checkpoint(architecture, tmp_path), dtype="bfloat16")


@needs_bf16
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2"])
def test_many_tokens_are_gated_in_the_same_go(activation: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"hidden_act": activation, "intermediate_size": 96, "mlp_bias": activation == "gelu"}
    directory = make_checkpoint("LlamaForCausalLM", tmp_path, **options)
    assert_alike(directory, lengths=(50, 60, 70), chunk=100, dtype="bfloat16")


@pytest.mark.parametrize("architecture", FUSED)
def test_composed_layers_compute_as_the_layers_do(architecture: str, tmp_path: Path) -> None:
    assert_alike(make_checkpoint(architecture, tmp_path), ComposedLayers, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bf16)])
@pytest.mark.parametrize(
    ("architecture", "has_ends"),
    [
        ("LlamaForCausalLM", True),
        ("Qwen3ForCausalLM", True),
        ("GemmaForCausalLM", False),  # multiplies what it has looked up
    ],
)
def test_the_ends_of_usual_models_are_in_the_same_call(
    architecture: str, has_ends: bool, dtype: str, tmp_path: Path
) -> None:
    layers = fused_of(Driver(make_checkpoint(architecture, tmp_path), dtype=dtype))
    assert layers is not None
    assert layers.has_ends == has_ends


@needs_bf16
@pytest.mark.parametrize(
    "rows",
    [[59], [0, 59], [24], [25, 24], [9, 39, 40, 59], [20, 21, 22, 23, 24], list(range(60)), []],
)
def test_the_last_layer_computes_what_is_asked_for(rows: list[int], tmp_path: Path) -> None:
    layers = fused_of(Driver(make_checkpoint("MistralForCausalLM", tmp_path), dtype="bfloat16"))
    assert isinstance(layers, DecoderLayers)
    lengths = np.array([25, 15, 20])
    block_table = np.arange(12, dtype=np.int32).reshape(3, 4)
    plan = AttentionPlan(lengths, lengths, block_table, 16, torch.bfloat16, torch.device("cpu"))
    positions = np.concatenate([np.arange(length) for length in lengths])
    slots = np.repeat(block_table[:, 0], lengths) * 16 + positions
    batch = torch.arange(60) % 31, [plan], [torch.from_numpy(slots).long()], torch.from_numpy(positions)
    logits, likeliest = layers.logits(*batch, torch.arange(60))
    asked, likeliest_asked = layers.logits(*batch, torch.tensor(rows, dtype=torch.int64))
    assert torch.equal(asked, logits[rows])
    for ours, of_all in zip(likeliest_asked, likeliest, strict=True):
        assert torch.equal(ours, of_all[rows])


@needs_bf16
@pytest.mark.parametrize(("params", "in_one"), [(GREEDY, True), (RANDOM, False), (PARAMS, False)])
def test_steps_that_only_decode_the_likeliest_token_are_one_call(
    params: SamplingParams, in_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    decode = DecoderLayers.decode

    def counted(self: DecoderLayers, slots: Any, *args: Any, **kwargs: Any) -> Any:
        token_ids = decode(self, slots, *args, **kwargs)
        if token_ids is not None:
            calls.append(slots.size)
        return token_ids

    monkeypatch.setattr(DecoderLayers, "decode", counted)
    driver = Driver(make_checkpoint("LlamaForCausalLM", tmp_path), dtype="bfloat16")
    driver.generate(make_prompts((5, 40)), params, chunk=64)
    assert bool(calls) == in_one
    assert all(size == 2 for size in calls)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bf16)])
def test_a_sequence_without_a_number_ends_alone(dtype: str, tmp_path: Path) -> None:
    driver = Driver(make_checkpoint("LlamaForCausalLM", tmp_path), dtype=dtype)
    assert fused_of(driver) is not None
    good, bad = make_prompts((9, 12))
    expected = driver.generate([good], GREEDY)[0].output
    model = driver.worker._model
    assert model is not None
    poisoned = next(token for token in bad if token not in good and token not in expected)
    table = model.embed_tokens
    rows = table.weight.data
    (rows[poisoned // 32, :, poisoned % 32] if rows.ndim == 4 else rows[poisoned]).fill_(torch.nan)
    ours, theirs = driver.generate([good, bad], GREEDY)
    assert ours.output == expected
    assert not theirs.output
    assert theirs.bad is not None


@needs_bf16
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("quantization", ["int8", "int8-g32", "int4"])
def test_fused_layers_take_integers(quantization: str, is_tied: bool, tmp_path: Path) -> None:
    directory = make_checkpoint("Qwen2ForCausalLM", tmp_path, tie_word_embeddings=is_tied)
    assert_alike(directory, dtype="bfloat16", quantization=quantization)
    layers = fused_of(Driver(directory, dtype="bfloat16", quantization=quantization))
    assert layers is not None
    assert layers.has_ends


@needs_bf16
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_many_rows_are_gated_with_integers_too(quantization: str, tmp_path: Path) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path, intermediate_size=128)
    assert_alike(directory, lengths=(150, 140), chunk=300, dtype="bfloat16", quantization=quantization)


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker with three helpers in steps of any size."""
    monkeypatch.setattr("pagoda_worker.threads.SINGLE_THREAD_PARAMETERS", 0)
    monkeypatch.setattr("pagoda_worker.threads.HELPED_ROWS", 1000)
    before = torch.get_num_threads()
    yield Worker(num_threads=4)
    set_num_helpers(0)
    torch.set_num_threads(before)


def num_helpers() -> int:
    """Of this process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pagoda-helper\n")


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Other processes want more of the processors than there are: helpers hardly ever bring a part to an end."""
    count = 2 * len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield
    for other in others:
        other.kill()
        other.wait()


WIDE = {"hidden_size": 256, "intermediate_size": 1120, "vocab_size": 3000, "mlp_bias": True, "attention_bias": True}


@needs_bf16
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_helpers_change_nothing(helped: Worker, quantization: str | None, tmp_path: Path) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path, **WIDE)
    assert_alike(directory, chunk=70, worker=helped, dtype="bfloat16", quantization=quantization)
    assert num_helpers() >= 3


MANY_KEYS: dict[str, Any] = WIDE | {"max_position_embeddings": 2048}
"""With a thousand tokens: helpers attend to so many, in two partitions."""


@needs_bf16
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"num_key_value_heads": 4}),
        ("MistralForCausalLM", {"sliding_window": 700, "attention_bias": False, "mlp_bias": False}),
    ],
)
def test_helpers_attend_as_one_thread_does(
    architecture: str, options: dict[str, Any], helped: Worker, tmp_path: Path
) -> None:
    directory = make_checkpoint(architecture, tmp_path, **(MANY_KEYS | options))
    assert_alike(directory, lengths=(1015, 1100, 290), chunk=400, worker=helped, dtype="bfloat16")


@needs_bf16
def test_a_late_helper_reads_what_is_still_there(helped: Worker, busy_machine: None, tmp_path: Path) -> None:
    driver = Driver(make_checkpoint("LlamaForCausalLM", tmp_path, **MANY_KEYS), worker=helped, dtype="bfloat16")
    for _ in range(4):
        outputs = [one.output for one in driver.generate(make_prompts((1015, 290)), max_tokens=100)]
        assert all(len(output) == 100 for output in outputs)


@needs_bf16
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_nobody_waits_for_a_helper_without_a_processor(
    helped: Worker, busy_machine: None, quantization: str | None, tmp_path: Path
) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path, **WIDE)
    assert_alike(directory, chunk=70, worker=helped, dtype="bfloat16", quantization=quantization)


@needs_bf16
def test_helpers_end_with_the_layers(helped: Worker, tmp_path: Path) -> None:
    driver = Driver(make_checkpoint("LlamaForCausalLM", tmp_path, **WIDE), worker=helped, dtype="bfloat16")
    gc.collect()
    before = num_helpers()
    driver.generate(make_prompts((40,)), GREEDY)
    assert num_helpers() == before + 3
    driver.worker.sleep(2)
    gc.collect()
    assert num_helpers() == before


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [(name, dtype) for name in NOT_FUSED for dtype in ("float32", "bfloat16")]
    + [(name, "float32") for name in MIXTURES],
)
def test_other_models_run_their_layers_one_by_one(architecture: str, dtype: str, tmp_path: Path) -> None:
    driver = Driver(make_checkpoint(architecture, tmp_path), dtype=dtype)
    assert fused_of(driver) is None
    assert all(len(one.output) == 4 for one in driver.generate(make_prompts((3, 18)), max_tokens=4))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "reference_kernels": ("none",)},
        {"dtype": "float32", "reference_kernels": ("all",)},
        {"dtype": "float32", "reference_kernels": ("act_and_mul", "paged_attention", "rms_norm")},
        {"dtype": "float32", "kv_cache_dtype": "int8"},
        {"dtype": "float32", "quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"reference_kernels": ("rms_norm",)},
        {"reference_kernels": ("decoder_layers",)},
        {"reference_kernels": ("all",)},
    ],
)
def test_what_has_no_kernel_for_every_operation_is_not_fused(options: dict[str, Any], tmp_path: Path) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path)
    assert fused_of(Driver(directory, **{"dtype": "bfloat16", **options})) is None


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bf16)])
def test_new_weights_are_seen(dtype: str, tmp_path: Path) -> None:
    first = make_checkpoint("LlamaForCausalLM", tmp_path / "first")
    driver = Driver(first, dtype=dtype)
    before = described(driver.generate(make_prompts((5, 40)), PARAMS))
    driver.worker.sleep(2)
    driver.worker.wake_up()
    driver.worker.initialize_cache(num_blocks=600, num_cpu_blocks=0)
    assert fused_of(driver) is not None
    assert described(driver.generate(make_prompts((5, 40)), PARAMS)) == before
