"""The life of a worker, call by call: what each call keeps, drops and refuses."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.errors import ConfigError, ModelLoadError, OutOfMemory, StaleEpoch
from pagoda_worker.loader import model_weights
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.memory.memory_ahead import MemoryAhead
from pagoda_worker.parallel.tensor_parallel import TensorParallel
from pagoda_worker.steps.step import StepInput
from pagoda_worker.worker import Worker

OTHER = WeightsSource(model="other", version=3)


def make_config(*, max_num_seqs: int = 4) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="pagoda-tiny", dtype="float32", device="cpu", load_format="dummy"),
        cache=CacheConfig(block_size=16, kv_cache_memory_bytes=1 << 26),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        lora=LoraConfig(enable_lora=True),
    )


def no_progress(loaded: int, total: int) -> None:
    """No one asks."""


@pytest.fixture
def loaded() -> Worker:
    worker = Worker(num_threads=1)
    worker.init_device(make_config())
    worker.load_model(no_progress)
    return worker


def test_calls_out_of_order_say_which_one_comes_first() -> None:
    worker = Worker(num_threads=1)
    first, second = "the device is not initialized: call InitDevice first", "the model is not loaded: call LoadModel"
    assert worker.state == "started"
    assert worker.weights is None
    for call in (
        lambda: worker.load_model(no_progress),
        lambda: worker.sleep(1),
        worker.determine_num_available_blocks,
        lambda: worker.initialize_cache(num_blocks=1, num_cpu_blocks=0),
    ):
        with pytest.raises(StaleEpoch, match=first):
            call()
    worker.init_device(make_config())
    assert worker.state == "device"
    for call in (
        worker.determine_num_available_blocks,
        lambda: worker.initialize_cache(num_blocks=1, num_cpu_blocks=0),
        lambda: worker.prepare_weights(OTHER, no_progress),
        lambda: worker.reload_weights(OTHER, no_progress),
        lambda: worker.cache_layout,
    ):
        with pytest.raises(StaleEpoch, match=second):
            call()
    assert worker.can_begin(StepInput())
    with pytest.raises(StaleEpoch, match=r"^the cache is not initialized: call InitializeCache first$"):
        worker.execute_model(StepInput())
    worker.touch_ahead(lambda: True)


def test_the_states_of_a_life(loaded: Worker) -> None:
    assert (loaded.state, loaded.num_blocks, loaded.sleep_level) == ("loaded", 0, 0)
    assert loaded.initialize_cache(num_blocks=3, num_cpu_blocks=0) == 0, "nothing to move blocks to"
    assert (loaded.state, loaded.num_blocks) == ("serving", 3)
    assert loaded.initialize_cache(num_blocks=2, num_cpu_blocks=1) > 0
    assert loaded.num_blocks == 2
    assert loaded.facts is not None
    runner = loaded._runner
    assert runner is not None
    assert loaded.sleep(1) == runner.cache_bytes + loaded.facts.weight_bytes
    assert (loaded.state, loaded.num_blocks, loaded.sleep_level) == ("sleeping", 0, 1)
    assert loaded.sleep(2) == 0
    assert loaded.sleep_level == 2
    assert loaded.sleep(1) == 0
    assert loaded.sleep_level == 2, "a lighter sleep wakes nothing"
    loaded.wake_up(weights_only=True)
    assert (loaded.state, loaded.sleep_level) == ("sleeping", 2)
    loaded.wake_up()
    assert (loaded.state, loaded.sleep_level, loaded.num_blocks) == ("loaded", 0, 0)


def test_a_load_wakes_it_and_answers_as_the_first_one(loaded: Worker) -> None:
    facts = loaded.facts
    loaded.sleep(2)
    assert loaded.load_model(no_progress) is facts
    assert loaded.state == "loaded"
    assert loaded._model is not None
    assert not any(parameter.is_meta for parameter in loaded._model.parameters())


def test_a_cache_has_a_block_at_least(loaded: Worker) -> None:
    loaded.initialize_cache(num_blocks=1, num_cpu_blocks=0)
    for number in (0, -1):
        with pytest.raises(ConfigError, match=f"^num_blocks is {number}, must be at least 1$") as error:
            loaded.initialize_cache(num_blocks=number, num_cpu_blocks=0)
        assert error.value.field == "num_blocks"
    assert (loaded.state, loaded.num_blocks) == ("serving", 1), "a refused call changes nothing"


def test_a_new_cache_forgets_the_numbers_of_adapters(loaded: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded.adapters is not None
    calls: list[str] = []
    monkeypatch.setattr(loaded.adapters, "forget_numbers", lambda: calls.append("forget"))
    loaded.initialize_cache(num_blocks=1, num_cpu_blocks=0)
    loaded.initialize_cache(num_blocks=1, num_cpu_blocks=0)
    assert calls == ["forget"] * 2


def test_a_cache_that_does_not_fit_names_the_flag(loaded: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **more: object) -> None:
        raise MemoryError

    monkeypatch.setattr(LoadedModel, "make_cache", fail)
    with pytest.raises(OutOfMemory, match=r"^cannot allocate 7 KV-cache blocks: lower --kv-cache-memory$"):
        loaded.initialize_cache(num_blocks=7, num_cpu_blocks=0)
    assert loaded.state == "loaded"


def test_only_the_first_cache_is_touched_at_once(loaded: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(MemoryAhead, "take_early", lambda self: calls.append(1))
    loaded.initialize_cache(num_blocks=1, num_cpu_blocks=0)
    loaded.initialize_cache(num_blocks=1, num_cpu_blocks=0)
    assert calls == [1]


def test_the_same_config_keeps_the_model_and_another_drops_it(loaded: Worker) -> None:
    loaded.initialize_cache(num_blocks=2, num_cpu_blocks=0)
    model, grammars = loaded._model, loaded.grammars
    device = loaded.init_device(make_config())
    assert device.device == torch.device("cpu")
    assert (loaded.state, loaded.num_blocks) == ("serving", 2)
    assert loaded._model is model
    assert loaded.grammars is grammars
    loaded.sleep(1)
    loaded.init_device(make_config(max_num_seqs=5))
    assert (loaded.state, loaded.num_blocks, loaded.sleep_level) == ("device", 0, 0)
    assert (loaded.facts, loaded.adapters, loaded._lora_rows, loaded._weights, loaded.weights) == (None,) * 5
    assert loaded.grammars is not grammars


class Weights:
    """Says what it is asked."""

    def __init__(self, source: WeightsSource | None = None, prepared: WeightsSource | None = None) -> None:
        self.source = source
        self.prepared_source = prepared
        self.calls: list[tuple[Any, ...]] = []

    def forget_prepared(self) -> None:
        self.calls.append(("forget",))

    def prepare(self, source: WeightsSource, progress: object) -> None:
        self.calls.append(("prepare", source, progress))

    def reload(self, source: WeightsSource | None, progress: object) -> None:
        self.calls.append(("reload", source, progress))

    def leave_device(self, *, level: int) -> int:
        self.calls.append(("leave", level))
        return 100 * level

    def come_back(self, progress: object) -> None:
        self.calls.append(("back",))


@pytest.fixture
def weights(loaded: Worker) -> Weights:
    loaded.initialize_cache(num_blocks=2, num_cpu_blocks=0)
    fake = Weights()
    loaded._weights = fake  # type: ignore[assignment]  # says what it is asked
    return fake


def test_weights_are_asked_for_by_the_latest_call(loaded: Worker, weights: Weights) -> None:
    loaded.init_device(make_config(), OTHER)
    assert weights.calls == [("forget",)], "those of another scheduler"
    loaded.load_model(no_progress)
    assert weights.calls[1:] == [("reload", OTHER, no_progress)]
    weights.source = OTHER
    assert loaded.weights == OTHER
    loaded.reload_weights(None, no_progress)
    loaded.load_model(no_progress)
    assert weights.calls[2:] == [("reload", None, no_progress)] * 2


def test_prepared_weights_are_forgotten_where_there_are_none(loaded: Worker, weights: Weights) -> None:
    loaded.prepare_weights(OTHER, no_progress)
    loaded.prepare_weights(None, no_progress)
    assert weights.calls == [("prepare", OTHER, no_progress), ("forget",)]


def test_weights_in_use_and_prepared_ones_are_in_memory(loaded: Worker, weights: Weights) -> None:
    third = WeightsSource(model="third")
    weights.source, weights.prepared_source = OTHER, third
    assert loaded.has_prepared(OTHER)
    assert loaded.has_prepared(third)
    assert not loaded.has_prepared(WeightsSource(model="other", version=4))
    assert not Worker(num_threads=1).has_prepared(OTHER)


def test_other_weights_end_the_cache_and_the_same_do_not(loaded: Worker, weights: Weights) -> None:
    loaded.reload_weights(None, no_progress)
    assert (loaded.state, loaded.num_blocks) == ("serving", 2)
    loaded.reload_weights(OTHER, no_progress)
    assert (loaded.state, loaded.num_blocks) == ("loaded", 0)


def test_what_fails_keeps_the_cache(loaded: Worker, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object, progress: object) -> None:
        raise OutOfMemory("no room")

    monkeypatch.setattr(weights, "reload", fail)
    with pytest.raises(OutOfMemory, match=r"^no room$"):
        loaded.reload_weights(OTHER, no_progress)
    assert (loaded.state, loaded.num_blocks) == ("serving", 2)
    monkeypatch.setattr(weights, "come_back", lambda progress: fail(None, progress))
    loaded.sleep(2)
    with pytest.raises(OutOfMemory):
        loaded.wake_up()
    assert loaded.sleep_level == 2


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_is_told_to_the_weights(level: int, loaded: Worker, weights: Weights) -> None:
    assert loaded._runner is not None
    num_bytes = loaded._runner.cache_bytes
    assert num_bytes > 0
    assert loaded.sleep(level) == num_bytes + 100 * level
    assert loaded._attention is None
    assert loaded.sleep(level) == 100 * level
    assert weights.calls == [("leave", level)] * 2


def parallel_of(rank: int, calls: list[Any]) -> TensorParallel:
    return SimpleNamespace(  # type: ignore[return-value]  # what init_device asks of it
        world_size=2,
        is_leader=rank == 0,
        close=lambda: calls.append("close"),
        open=lambda: calls.append("open"),
        invite=lambda place: calls.append(place),
    )


@pytest.mark.parametrize(
    ("rank", "rendezvous", "expected"), [(0, "", ["open"]), (0, "x:1", ["open"]), (1, "x:1", ["x:1"]), (1, "", [])]
)
def test_rank_0_opens_a_meeting_place_and_others_are_told_it(rank: int, rendezvous: str, expected: list[Any]) -> None:
    calls: list[Any] = []
    worker = Worker(num_threads=1, parallel=parallel_of(rank, calls))
    worker.init_device(make_config(), rendezvous=rendezvous)
    worker.init_device(make_config(), rendezvous=rendezvous)
    assert calls == expected * 2


def test_one_rank_meets_no_other() -> None:
    worker = Worker(num_threads=1)
    worker.init_device(make_config())
    assert worker.parallel.world_size == 1


@pytest.mark.parametrize("more", [0, 1])
def test_prepared_weights_have_to_fit_beside_those_in_use(
    more: int, loaded: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = loaded._weights
    assert held is not None
    monkeypatch.setattr(model_weights, "available_memory_bytes", lambda: held.num_bytes - more)
    monkeypatch.setattr(held, "_read", lambda *args: None)
    source = WeightsSource(model="pagoda-other")
    if not more:
        held.prepare(source, no_progress)
        assert held.prepared_source == source
        held.forget_prepared()
        assert held.prepared_source is None
        return
    size = held.num_bytes / 2**20
    with pytest.raises(OutOfMemory) as error:
        held.prepare(source, no_progress)
    assert str(error.value) == (
        f"the weights of pagoda-other need {size:.0f} MiB of host memory beside those in use, "
        f"{(held.num_bytes - 1) / 2**20:.0f} MiB are available"
    )
    assert held.prepared_source is None


def test_a_constraint_is_compiled_before_its_step(loaded: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(loaded.grammars, "template", asked.append)
    requests: Any = [
        SimpleNamespace(sampling_params=SimpleNamespace(structured_outputs=value)) for value in (None, "a", None, "b")
    ]
    loaded.expect(StepInput(new_requests=requests))
    assert asked == ["a", "b"]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (MemoryError("2 GiB"), OutOfMemory, "no memory for the weights of pagoda-tiny: 2 GiB"),
        (OSError("ends within x"), ModelLoadError, "cannot read the weights of pagoda-tiny: ends within x"),
        (SafetensorError("no header"), ModelLoadError, "cannot read the weights of pagoda-tiny: no header"),
    ],
)
def test_weights_that_cannot_be_read_are_named(
    error: Exception, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_weights(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(model_weights, "load_weights", load_weights)
    worker, config = Worker(num_threads=1), make_config()
    worker.init_device(replace(config, model=replace(config.model, load_format="auto")))
    with pytest.raises(kind) as caught:
        worker.load_model(no_progress)
    assert str(caught.value) == message
    assert worker.state == "device"
