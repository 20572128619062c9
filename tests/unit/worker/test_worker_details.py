"""What a worker passes on and keeps: facts of a model, the parts of its runner, and weights of a device with memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_worker import worker as worker_module
from pagoda_worker.attention.choice import AttentionChoice
from pagoda_worker.loader import read_model as read_module
from pagoda_worker.loader.checkpoint import Checkpoint
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.loader.model_facts import ModelFacts
from pagoda_worker.pooling.pooling_files import PoolingFiles
from pagoda_worker.worker import Worker

TINY = "pagoda-tiny"
NUM_PARAMETERS = 3_345_216
"""A table of 3072 x 192, seven layers of 393,600 and a norm."""


def no_progress(loaded: int, total: int) -> None:
    """No one asks."""


def config_of(**model: Any) -> EngineConfig:
    given = {"model": TINY, "dtype": "float32", "device": "cpu", "load_format": "dummy", **model}
    return EngineConfig(
        model=ModelConfig(**given),
        cache=CacheConfig(block_size=16, kv_cache_memory_bytes=1 << 26, kv_cache_dtype="int8"),
        scheduler=SchedulerConfig(max_num_seqs=3),
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
    )


def loaded_worker(**model: Any) -> Worker:
    worker = Worker(num_threads=1)
    worker.init_device(config_of(**model))
    worker.load_model(no_progress)
    return worker


@pytest.fixture(scope="module")
def shared() -> Worker:
    """One that a test leaves as it was."""
    return loaded_worker()


def test_facts_are_those_of_the_files_and_of_what_is_held(shared: Worker) -> None:
    generation = Path(cast("Path", resolve_model(TINY))) / "generation_config.json"
    assert shared.facts == ModelFacts(
        model=TINY,
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=3072,
        max_model_len=1024,
        num_layers=7,
        eos_token_ids=(0, 2),
        generation_config_json=generation.read_text(encoding="utf-8") if generation.is_file() else "",
        num_parameters=NUM_PARAMETERS,
        weight_bytes=4 * NUM_PARAMETERS,
        embedding_size=192,
        pooling_tasks=("embed",),
    )


@pytest.mark.parametrize(
    ("config", "stated"),
    [({}, None), ({"max_model_len": 100}, 100), ({"max_model_len": 0}, None), ({"max_model_len": "100"}, None)],
)
def test_a_config_may_state_the_context(config: dict[str, Any], stated: int | None) -> None:
    assert read_module._stated(cast("Checkpoint", SimpleNamespace(config=config))) == stated


@pytest.mark.parametrize(
    ("only_pools", "length", "expected"),
    [(True, 100, 100), (True, 600, 512), (True, None, 512), (False, 100, 512)],
)
def test_texts_of_encoders_are_as_long_as_they_were_trained_with(
    only_pools: bool, length: int | None, expected: int
) -> None:
    model: Any = SimpleNamespace(max_position_embeddings=512, only_pools=only_pools)
    checkpoint: Any = SimpleNamespace(pooling=PoolingFiles(max_seq_length=length))
    assert read_module._longest(model, checkpoint) == expected


def test_attention_is_chosen_for_the_loaded_model_once(shared: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def choose(config: EngineConfig, layers: Any, **more: Any) -> AttentionChoice:
        given.append((config, layers, more))
        return AttentionChoice()

    monkeypatch.setattr(worker_module, "choose_attention", choose)
    monkeypatch.setattr(shared, "_attention", None)
    assert shared._chosen_attention() is shared._chosen_attention()
    assert shared._model is not None
    assert given == [
        (
            shared._config,
            shared._model.attention_layers,
            {
                "dtype": torch.float32,
                "max_model_len": 1024,
                "device": torch.device("cpu"),
                "has_windows": False,
            },
        )
    ]


def test_a_loaded_model_has_the_settings_of_its_caches(shared: Worker) -> None:
    loaded = shared._loaded_model()
    assert loaded == LoadedModel(
        model=cast("Any", shared._model),
        config=config_of(),
        max_model_len=1024,
        weight_bytes=4 * NUM_PARAMETERS,
        dtype=torch.float32,
        cache_dtype=torch.int8,
        device=torch.device("cpu"),
        layout=shared.cache_layout,
        parallel=shared.parallel,
        attention=cast("AttentionChoice", shared._attention),
    )


def test_a_runner_is_given_what_the_worker_has(shared: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def runner(**more: Any) -> Any:
        given.update(more)
        return SimpleNamespace()

    monkeypatch.setattr(worker_module, "ModelRunner", runner)
    monkeypatch.setattr(worker_module, "load_logits_processors", lambda names, **more: (names, more))
    monkeypatch.setattr(shared, "_runner", None)
    monkeypatch.setattr(shared, "num_blocks", 0)
    monkeypatch.setattr(shared, "_lora_rows", "rows")
    monkeypatch.setattr(shared, "adapters", SimpleNamespace(forget_numbers=lambda: None))
    shared.initialize_cache(num_blocks=5, num_cpu_blocks=2)
    cache = given.pop("kv_cache")
    assert (cache.num_blocks, cache.num_cpu_blocks, cache.block_size) == (5, 2, 16)
    assert given.pop("attention") is shared._attention
    assert given == {
        "model": shared._model,
        "max_num_seqs": 3,
        "max_model_len": 1024,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "logprobs_mode": "raw_logprobs",
        "logits_processors": ((), {"vocab_size": 3072, "device": torch.device("cpu")}),
        "grammars": shared.grammars,
        "eos_token_ids": (0, 2),
        "parallel": shared.parallel,
        "speculative": config_of().speculative,
        "states": None,
        "decode_graphs": None,
        "pooler": shared._pooler,
        "lora": "rows",
        "adapters": shared.adapters,
        "overlaps": False,
    }


def test_free_blocks_are_counted_without_an_earlier_cache(shared: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_runner", "a cache")
    monkeypatch.setattr(worker_module, "available_blocks", lambda loaded: (loaded.max_model_len, shared._runner))
    assert shared.determine_num_available_blocks() == (1024, None)


def test_constraints_are_compiled_for_the_model_that_is_loaded(shared: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(worker_module, "load_compiler", lambda *args, **more: given.append((args, more)))
    shared._load_compiler()
    assert given == [((TINY,), {"revision": None, "vocab_size": 3072, "eos_token_ids": (0, 2)})]


@pytest.mark.parametrize("refusal", ["chunks", "layout"])
def test_a_model_that_its_scheduler_or_cache_cannot_serve_is_not_kept(
    refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(num_threads=1)
    worker.init_device(config_of())

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("no")

    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "check_chunks" if refusal == "chunks" else "make_layout", refuse)
        with pytest.raises(ConfigError, match=r"^no$"):
            worker.load_model(no_progress)
    assert (worker.state, worker.facts, worker.weights) == ("device", None, None)
    asked: list[Any] = []
    monkeypatch.setattr(worker_module, "check_chunks", lambda chunks, **more: asked.append((list(chunks), more)))
    worker.load_model(no_progress)
    assert worker.state == "loaded"
    assert asked == [([None] * 7, {"block_size": 16, "max_model_len": 1024})]


class _Accelerator:
    """A device with memory of its own, as far as weights look at it."""

    type = "xpu"


def test_other_weights_go_where_those_in_use_are() -> None:
    """A device's memory is not taken twice; host memory is exchanged."""
    worker = loaded_worker()
    weights, model = worker._weights, worker._model
    assert weights is not None
    assert model is not None
    base = weights.source
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in model.named_parameters()}
    weights.prepare(WeightsSource(model=TINY, version=1), no_progress)
    prepared = weights._prepared
    assert prepared is not None
    wanted = {name: parameter.clone() for name, parameter in prepared[1].named_parameters()}
    weights._device = cast("Any", _Accelerator())
    weights.reload(WeightsSource(model=TINY, version=1), no_progress)
    assert (base, weights.source, weights.prepared_source) == (None, WeightsSource(model=TINY, version=1), None)
    for name, parameter in model.named_parameters():
        place, old = before[name]
        assert parameter.data_ptr() == place, name
        assert torch.equal(parameter, wanted[name]), name
        assert parameter.dim() == 1 or not torch.equal(parameter, old), name


def test_weights_that_are_in_use_are_not_read_again(monkeypatch: pytest.MonkeyPatch, shared: Worker) -> None:
    weights = shared._weights
    assert weights is not None

    def fail(*_: Any) -> None:
        raise ModelLoadError("read")

    monkeypatch.setattr(weights, "_read", fail)
    weights.reload(None, no_progress)
    weights.come_back(no_progress)
    with pytest.raises(ModelLoadError):
        weights.reload(WeightsSource(model="other"), no_progress)
    assert (weights.source, weights.prepared_source) == (None, None)
