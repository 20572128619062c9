"""Each option that a worker has been given reaches the part that obeys it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import ConfigError
from pagoda_worker import worker as module
from pagoda_worker.loader import loaded_model
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.worker import Worker


def make_config(*, cache: dict[str, Any] | None = None, **model: Any) -> EngineConfig:
    options: dict[str, Any] = {"model": "pagoda-tiny", "dtype": "float32", "device": "cpu", "load_format": "dummy"}
    return EngineConfig(
        model=ModelConfig(**options | {"max_model_len": 50, "logprobs_mode": "processed_logits"} | model),
        cache=CacheConfig(block_size=8, kv_cache_memory_bytes=1 << 24, **cache or {}),
        scheduler=SchedulerConfig(max_num_seqs=3),
        speculative=SpeculativeConfig(num_speculative_tokens=2),
        lora=LoraConfig(enable_lora=True),
    )


def no_progress(loaded: int, total: int) -> None:
    """No one asks."""


@pytest.fixture(scope="module")
def worker() -> Worker:
    worker = Worker(num_threads=1)
    worker.init_device(make_config())
    worker.load_model(no_progress)
    return worker


def initialize(worker: Worker) -> int:
    return worker.initialize_cache(num_blocks=9, num_cpu_blocks=4, num_state_snapshots=6, num_cpu_state_snapshots=5)


def test_a_runner_is_given_all_that_the_worker_knows(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    loaded_processors: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []

    def processors(names: Any, **options: Any) -> str:
        loaded_processors.append({"names": names, **options})
        return "processors"

    monkeypatch.setattr(module, "ModelRunner", lambda **options: given.append(options))
    monkeypatch.setattr(module, "load_logits_processors", processors)
    monkeypatch.setattr(LoadedModel, "make_states", lambda loaded, **sizes: states.append(sizes) or "states")
    initialize(worker)
    (options,), facts, config = given, worker.facts, worker._config
    assert facts is not None
    assert config is not None
    cache = options.pop("kv_cache")
    assert (cache.num_blocks, cache.num_cpu_blocks, cache.block_size) == (9, 4, 8)
    assert states == [{"num_snapshots": 6, "num_cpu_snapshots": 5}]
    assert loaded_processors == [{"names": (), "vocab_size": facts.vocab_size, "device": torch.device("cpu")}]
    assert options == {
        "model": worker._model,
        "max_num_seqs": 3,
        "max_model_len": 50,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "logprobs_mode": "processed_logits",
        "logits_processors": "processors",
        "grammars": worker.grammars,
        "eos_token_ids": facts.eos_token_ids,
        "parallel": worker.parallel,
        "speculative": config.speculative,
        "states": "states",
        "decode_graphs": None,
        "attention": worker._attention,
        "pooler": worker._pooler,
        "lora": worker._lora_rows,
        "adapters": worker.adapters,
        "overlaps": False,
    }
    assert None not in (options["attention"], options["pooler"], options["lora"], options["adapters"])
    assert facts.eos_token_ids


def test_a_runner_gives_its_parts_what_they_need(worker: Worker) -> None:
    initialize(worker)
    runner, facts = worker._runner, worker.facts
    assert isinstance(runner, ModelRunner)
    assert facts is not None
    constraints, sampler, in_flight = runner._constraints, runner._step_sampler, runner._in_flight
    assert (constraints._grammars, constraints._vocab_size) == (worker.grammars, facts.vocab_size)
    assert constraints._eos_token_ids == facts.eos_token_ids
    assert sampler._pooler is worker._pooler
    assert [(part._gives_processed, part._gives_logprobs) for part in (sampler, in_flight)] == [(True, False)] * 2
    assert sampler._sampler is in_flight._sampler is runner._sampler
    assert sampler._batch is in_flight._batch is runner.input_batch
    assert sampler._processors is runner._processors
    assert sampler._constraints is constraints
    assert (runner.forward._attention, runner.forward._lora) == (worker._attention, worker._lora_rows)
    assert runner._adapters is worker.adapters
    batch = runner.input_batch
    assert (batch._max_tokens, batch._block_size, batch._num_blocks) == (51, 8, 9)
    assert (batch._vocab_size, batch._groups) == (facts.vocab_size, worker.cache_layout.groups)
    assert batch.drafter is not None
    assert batch.is_in_use.size == 3


@pytest.mark.parametrize("overlaps", [False, True])
def test_who_starts_a_worker_may_say_whether_steps_overlap(
    overlaps: bool, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_overlaps", overlaps)
    initialize(worker)
    assert worker._runner is not None
    assert (worker._runner._overlaps, worker._runner._is_alone) == (overlaps, not overlaps)


@pytest.mark.parametrize(
    ("device", "waits", "overlaps"), [("cuda", None, True), ("cuda", "a rank", False), ("cpu", None, False)]
)
def test_steps_overlap_on_an_accelerator_where_nothing_else_is_waited_for(
    device: str, waits: str | None, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "what_waits", lambda loaded: waits)
    loaded: Any = SimpleNamespace(device=torch.device(device))
    assert Worker._can_overlap(loaded) is overlaps


def test_weights_of_a_large_model_move_to_huge_pages(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(module, "use_huge_pages", lambda tensors: moved.append(len(list(tensors))))
    initialize(worker)
    assert moved == []
    assert worker.facts is not None
    assert worker._model is not None
    monkeypatch.setattr(loaded_model, "LARGE_MODEL_BYTES", worker.facts.weight_bytes)
    initialize(worker)
    assert moved == [len(list(worker._model.parameters()))]


def test_grammars_are_of_the_model_s_tokenizer(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(module, "load_compiler", lambda model, **options: asked.append((model, options)))
    config, facts = worker._config, worker.facts
    assert config is not None
    assert facts is not None
    monkeypatch.setattr(worker, "_config", replace(config, model=replace(config.model, revision="r")))
    worker._load_compiler()
    options = {"revision": "r", "vocab_size": facts.vocab_size, "eos_token_ids": facts.eos_token_ids}
    assert asked == [("pagoda-tiny", options)]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (make_config(device="auto", cache={"kv_cache_dtype": "fp8"}), "kv_cache_dtype"),
        (make_config(device="auto", attention_backend="triton"), "attention_backend"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_device_without_such_kernels_is_not_claimed(
    config: EngineConfig, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    worker = Worker(num_threads=1)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            worker.init_device(config)
        assert (caught.value.field, worker.state) == (field, "started")


def test_a_model_that_the_scheduler_cannot_serve_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, asked = Worker(num_threads=1), list[Any]()

    def refuse(chunks: Any, **sizes: Any) -> None:
        asked.append((list(chunks), sizes))
        raise ConfigError("no such chunks", field="block_size")

    worker.init_device(make_config())
    with monkeypatch.context() as patch:
        patch.setattr(module, "check_chunks", refuse)
        for _ in range(2):
            with pytest.raises(ConfigError, match="no such chunks"):
                worker.load_model(no_progress)
            assert (worker.state, worker.facts, worker.weights, worker._weights) == ("device", None, None, None)
    chunks, sizes = asked[0]
    assert sizes == {"block_size": 8, "max_model_len": 50}
    assert set(chunks) == {None}
    assert worker.load_model(no_progress).max_model_len == 50


def test_threads_are_chosen_by_the_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, chosen = Worker(num_threads=1), list[Any]()
    monkeypatch.setattr(worker._threads, "choose", lambda *args, **more: chosen.append((*args, more)))
    worker.init_device(make_config())
    facts = worker.load_model(no_progress)
    assert chosen == [(facts.num_parameters, torch.float32, {"only_pools": False})]
