"""A servicer over a worker that records its calls."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from pagoda.v1 import worker_pb2
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import EngineConfig
from pagoda_worker.loader.model_facts import ModelFacts
from pagoda_worker.memory.available_blocks import AvailableBlocks
from pagoda_worker.memory.device import DeviceInfo
from pagoda_worker.models.cache_groups import CacheLayout, plain_layout
from pagoda_worker.rpc.convert import engine_config_from_proto
from pagoda_worker.rpc.servicer import WorkerServicer
from pagoda_worker.steps.pending_step import DoneStep
from pagoda_worker.steps.step import StepInput, StepOutput, StepTimings

CALL = None  # no handler below reads its context
OTHER = WeightsSource(model="other", revision="r", version=9, is_for_one_group=True)
FACTS = ModelFacts(
    model="m",
    architecture="A",
    dtype="float32",
    vocab_size=10,
    max_model_len=20,
    num_layers=2,
    eos_token_ids=(3,),
    generation_config_json="{}",
    num_parameters=30,
    weight_bytes=40,
    quantization="",
    embedding_size=0,
)


class Core:
    """A worker that records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.parallel = SimpleNamespace(address="meet:1", abandon=lambda: self.asked.append(("abandon",)))
        self.sleep_level = 0
        self.weights: WeightsSource | None = None
        self.facts: ModelFacts | None = None
        self.cache_layout: CacheLayout = plain_layout(2)
        self.state = "device"
        self.num_blocks = 17
        self.adapters: Any = None
        self.prepared: list[WeightsSource] = []
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def init_device(self, config: EngineConfig, weights: WeightsSource | None, **more: Any) -> DeviceInfo:
        self.asked.append(("init_device", config.model.model, weights, more))
        return DeviceInfo(torch.device("cpu"), "a device", 123)

    def load_model(self, progress: Any) -> ModelFacts:
        self.asked.append(("load_model",))
        progress(5, 50)
        assert self.gate.wait(240)
        if self.failure is not None:
            raise self.failure
        progress(50, 50)
        self.facts = FACTS
        return FACTS

    def determine_num_available_blocks(self) -> AvailableBlocks:
        return AvailableBlocks(1, 2, 3, 4, 5, 6)

    def initialize_cache(self, **given: int) -> int:
        self.asked.append(("initialize_cache", given))
        return 77

    def sleep(self, level: int) -> int:
        self.asked.append(("sleep", level))
        return 99

    def wake_up(self, *, weights_only: bool) -> None:
        self.asked.append(("wake_up", weights_only))

    def prepare_weights(self, source: WeightsSource | None, progress: Any) -> None:
        self.asked.append(("prepare", source))
        progress(7, 70)
        if self.failure is not None:
            raise self.failure
        self.prepared = [] if source is None else [source]

    def has_prepared(self, source: WeightsSource) -> bool:
        return source in self.prepared

    def reload_weights(self, source: WeightsSource | None, progress: Any) -> None:
        self.asked.append(("reload", source))
        self.weights = source

    def expect(self, step: StepInput) -> None:
        self.asked.append(("expect", step.num_seqs))

    def can_begin(self, step: StepInput) -> bool:
        return True

    def begin(self, step: StepInput) -> DoneStep:
        assert self.gate.wait(240)
        if self.failure is not None:
            return DoneStep(self.failure)
        return DoneStep(
            StepOutput(
                token_ids=np.array([step.num_seqs]),
                timings=StepTimings(queue_ns=1, prepare_ns=2, forward_ns=3, sample_ns=4),
            )
        )


class Served:
    """A servicer and what it tells."""

    def __init__(self) -> None:
        self.core = Core()
        self.serving: list[bool] = []
        self.stuck: list[str] = []
        self.observed: list[tuple[StepInput, StepOutput]] = []
        self.servicer = WorkerServicer(
            worker=cast("Any", self.core),
            set_serving=self._set_serving,
            on_stuck=lambda: self.stuck.append("stuck"),
            metrics=cast("Any", SimpleNamespace(observe=lambda step, output: self.observed.append((step, output)))),
        )

    async def _set_serving(self, is_serving: bool) -> None:
        self.serving.append(is_serving)

    @property
    def ids(self) -> dict[str, int]:
        fence = self.servicer.fence
        return {"session_epoch": fence.session_epoch, "worker_incarnation": fence.incarnation}

    def step(self, number: int, num_seqs: int = 1, **more: Any) -> worker_pb2.ExecuteModelRequest:
        return worker_pb2.ExecuteModelRequest(**{**self.ids, "step": number, "num_seqs": num_seqs, **more})


def init_request(epoch: int, **more: Any) -> worker_pb2.InitDeviceRequest:
    config = worker_pb2.WorkerConfig(
        model="m",
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.9,
        takes_cache_groups=True,
        **more.pop("config", {}),
    )
    engine_config_from_proto(config)
    return worker_pb2.InitDeviceRequest(session_epoch=epoch, config=config, **more)
