"""All ranks of a group in one process, a thread each: what a Worker does, done by every one of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from pagoda_common.config.engine_config import EngineConfig
from pagoda_worker.loader.model_facts import ModelFacts
from pagoda_worker.models.cache_groups import CacheLayout
from pagoda_worker.parallel.tensor_parallel import TensorParallel
from pagoda_worker.steps.step import StepInput, StepOutput
from pagoda_worker.worker import Worker


class Ranks:
    """As a Worker, and as a scheduler brings its ranks up. What comes back is rank 0's answer."""

    def __init__(self, world_size: int) -> None:
        self.workers = [
            Worker(num_threads=1, parallel=TensorParallel(rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        self._threads = [ThreadPoolExecutor(max_workers=1) for _ in self.workers]
        self.acknowledged: list[StepOutput] = []
        """The other ranks' answers to the latest step."""

    def init_device(self, config: EngineConfig, *, takes_cache_groups: bool = False) -> None:
        leader, *others = self.workers
        leader.init_device(config, takes_cache_groups=takes_cache_groups)
        for worker in others:
            worker.init_device(config, rendezvous=leader.parallel.address, takes_cache_groups=takes_cache_groups)

    @property
    def cache_layout(self) -> CacheLayout:
        return self.workers[0].cache_layout

    def load_model(self, progress: Callable[[int, int], None]) -> ModelFacts:
        facts: ModelFacts = self._all("load_model", progress)[0]
        return facts

    def initialize_cache(self, **blocks: int) -> int:
        swap_block_ns: int = self._all("initialize_cache", **blocks)[0]
        return swap_block_ns

    def execute_model(self, step: StepInput) -> StepOutput:
        outputs: list[StepOutput] = self._all("execute_model", step)
        self.acknowledged = outputs[1:]
        return outputs[0]

    def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What each rank returns, once all are done: one that still runs when another has failed would close the
        connections of the next start."""
        futures = [
            thread.submit(getattr(worker, method), *args, **kwargs)
            for thread, worker in zip(self._threads, self.workers, strict=True)
        ]
        wait(futures, timeout=240)
        return [future.result(timeout=0) for future in futures]
