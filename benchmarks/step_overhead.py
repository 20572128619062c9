"""What the split costs: time per decode step with the worker in this process and over gRPC, same engine, same model.

    python benchmarks/step_overhead.py --json benchmarks/results/step_overhead.jsonl

The engine (scheduler, step loop) is this process both times. In-process: the worker's core on a thread of its own, its
plain data handed over as they are. gRPC: `python -m pagoda_worker`, registered over loopback. Both are there all the
time and take turns of a few seconds, so that a machine which is faster in one minute than in the next favours neither.

    python benchmarks/step_overhead.py --device cuda --models 8B --batch-sizes 64

does the same on a GPU, which both workers share (`benchmarks/gpu/run_all.py` runs it).
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import uvloop

from benchmarks.cpu import checkpoints
from benchmarks.cpu.shapes import SHAPES
from benchmarks.gpu.steps import SHAPES as GPU_SHAPES
from benchmarks.tools.figures import Report, median, parser
from pagoda_common.config.engine_config import EMBEDDED_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.process.children import service_command, service_environment, spawn_service, stop_process
from pagoda_common.process.idle_memory import exempt_what_exists
from pagoda_common.process.memory import keep_freed_memory
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput, StepTimings
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.kv.cache_group import CacheSizes
from pagoda_scheduler.observability.timeline import Timeline
from pagoda_worker.steps import step as worker_step
from pagoda_worker.steps.pipeline import QueuedStep, StepPipeline
from pagoda_worker.threads import set_wait_policy
from pagoda_worker.worker import Worker
from tests.harness.scheduler import running_scheduler

WARM_UP_STEPS = 20
PROMPT_TOKENS = 16
MAX_MODEL_LEN = 4096
SMALL_BATCH = 16
"""Its steps take milliseconds: more of them make a turn."""


@dataclass(eq=False)
class Clock:
    """A sink that notes when each step's tokens arrive."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    """On the wire so far, when each step's tokens arrived."""
    read_bytes: Callable[[], int] = int
    num_open: int = 0
    """Sequences that have not ended."""
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    is_behind: bool = False

    def push(self, result: StepResult) -> None:
        self.num_open -= len(result.finished)
        if not self.num_open:
            self.is_done.set()
        self.times.append(time.perf_counter())
        self.counts.append(len(result.token_ids))
        self.num_bytes.append(self.read_bytes())

    def announce(self) -> None:
        pass

    def close(self, error: Exception) -> None:
        raise error

    def step_times(self, num_seqs: int) -> list[float]:
        """Seconds between steps in which every sequence got a token, without the first ones."""
        full = [time for time, count in zip(self.times, self.counts, strict=True) if count == num_seqs]
        return np.diff(full[WARM_UP_STEPS:]).tolist()


class MeanTimeline(Timeline):
    """Nanoseconds of every stage of the steps that decode a full batch. A step only notes what it has: what is added up
    later does not count as the scheduler's CPU."""

    def __init__(self, num_seqs: int) -> None:
        self._num_seqs = num_seqs
        self._schedule_ns: dict[int, int] = {}
        self._steps: list[tuple[int, StepTimings, int]] = []
        """What scheduling took, the timings of the result, what delivering took."""

    def scheduled(self, output: SchedulerOutput, schedule_ns: int) -> None:
        if output.num_tokens == len(output.slots) == self._num_seqs:
            self._schedule_ns[output.step] = schedule_ns

    def delivered(self, output: ModelRunnerOutput, deliver_ns: int) -> None:
        schedule_ns = self._schedule_ns.pop(output.step, None)
        if schedule_ns is not None and output.timings is not None:
            self._steps.append((schedule_ns, output.timings, deliver_ns))

    @property
    def stages(self) -> dict[str, list[int]]:
        """By stage, in the order of a step's life; a value a step."""
        stages: dict[str, list[int]] = defaultdict(list)
        for schedule_ns, timings, deliver_ns in self._steps:
            stages["schedule"].append(schedule_ns)
            for name, duration_ns in timings._asdict().items():
                stages[name.removesuffix("_ns")].append(duration_ns)
            stages["deliver"].append(deliver_ns)
        return stages

    @property
    def own_ms(self) -> float:
        """Median milliseconds of the scheduler's own work in a step; the wire and the worker are not in it."""
        stages = self.stages
        return sum(median(stages[stage]) for stage in ("schedule", "encode", "decode", "deliver")) / 1e6

    def describe(self) -> str:
        """Medians in milliseconds."""
        return ", ".join(f"{stage} {median(values) / 1e6:.3f}" for stage, values in self.stages.items())


class InProcessExecutor:
    """The worker's core on a thread of this process, with the loop that the worker's own process has."""

    def __init__(self, worker: Worker) -> None:
        self._steps = StepPipeline(worker=worker, submit=ThreadPoolExecutor(max_workers=1).submit)
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[ModelRunnerOutput | Exception] = asyncio.Queue()

    def send(self, output: SchedulerOutput) -> None:
        def give(answer: worker_step.StepOutput) -> None:
            counts = answer.num_sampled_tokens
            tell(ModelRunnerOutput(output.step, None if counts is None else counts.tolist(), answer.token_ids.tolist()))

        def tell(result: ModelRunnerOutput | Exception) -> None:
            self._loop.call_soon_threadsafe(self._results.put_nowait, result)

        self._steps.put(QueuedStep(_to_worker(output), give, tell))

    async def receive(self) -> ModelRunnerOutput:
        result = await self._results.get()
        if isinstance(result, Exception):
            raise result
        return result


def _to_worker(output: SchedulerOutput) -> worker_step.StepInput:
    def array(values: list[int]) -> Any:
        return np.array(values, dtype=np.int64)

    return worker_step.StepInput(
        freed_slots=array(output.freed_slots),
        new_requests=[
            worker_step.NewRequest(
                slot=new.slot,
                request_id=new.request_id,
                prompt_token_ids=array(new.prompt_token_ids),
                output_token_ids=array(new.output_token_ids),
                sampling_params=new.sampling_params,
                block_ids=array(new.block_ids),
                num_computed_tokens=new.num_computed_tokens,
                eos_token_ids=new.eos_token_ids,
            )
            for new in output.new_requests
        ],
        appended_slots=array(output.appended_slots),
        appended_block_ids=array(output.appended_block_ids),
        num_seqs=len(output.slots),
        slots=array(output.slots),
        num_scheduled_tokens=None if output.num_tokens == len(output.slots) else array(output.num_scheduled_tokens),
    )


def make_model(name: str, directory: Path) -> str:
    """A config whose weights are random. forward5ms is the Llama that benchmarks/cpu/ compares engines with, 125 M
    parameters in bfloat16: its forward pass takes at least 5 ms on both of two cores, so that the engine has none for
    itself. The others are for a GPU."""
    config = checkpoints.config(SHAPES["125m"]) if name == "forward5ms" else GPU_SHAPES[name]
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def make_config(model: str, num_seqs: int, *, is_async: bool, device: Literal["cpu", "cuda"]) -> EngineConfig:
    if model == EMBEDDED_MODEL:
        model_config = ModelConfig(model=model, device=device)
    else:
        length = None if device == "cpu" else MAX_MODEL_LEN
        model_config = ModelConfig(
            model=model, load_format="dummy", dtype="bfloat16", device=device, max_model_len=length
        )
    return EngineConfig(
        model=model_config,
        cache=CacheConfig(kv_cache_memory_bytes=2 * 2**30),
        scheduler=SchedulerConfig(
            max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, 16 * num_seqs), async_scheduling=is_async
        ),
    )


async def decode(engine: Engine, num_seqs: int, num_steps: int, vocab_size: int) -> tuple[list[float], float, float]:
    """Decode `num_seqs` sequences; seconds per step, CPU seconds of this process per step, bytes per step (median)."""
    client: Any = engine.cores[0]._executor
    exempt_what_exists()  # as the scheduler's own process does when it has started
    clock = Clock(
        read_bytes=lambda: getattr(client, "num_bytes_sent", 0) + getattr(client, "num_bytes_received", 0),
        num_open=num_seqs,
    )
    engine.sinks.clear()
    engine.sinks.add(clock)
    generator = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True, seed=0)
    for number in range(num_seqs):
        prompt = generator.integers(5, vocab_size, PROMPT_TOKENS).tolist()
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=params,
            max_model_len=MAX_MODEL_LEN,
            sink=clock,
        )
        engine.submit([request])
    while len(clock.times) < WARM_UP_STEPS:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    cpu, first = time.process_time(), len(clock.times)
    await clock.is_done.wait()
    per_step = (time.process_time() - cpu) / max(1, len(clock.times) - first)
    return clock.step_times(num_seqs), per_step, median(np.diff(clock.num_bytes[WARM_UP_STEPS:]).tolist())


@asynccontextmanager
async def in_process(config: EngineConfig) -> AsyncIterator[Engine]:
    keep_freed_memory()  # as the worker's own process does
    worker = Worker(shares_machine=True)  # as the other one's process has it
    worker.init_device(config)
    facts = worker.load_model(lambda loaded, total: None)
    num_blocks = worker.determine_num_available_blocks().num_blocks
    worker.initialize_cache(num_blocks=num_blocks, num_cpu_blocks=0)
    engine = Engine(config=config)
    core = EngineCore(
        config=config,
        executor=InProcessExecutor(worker),
        sizes=CacheSizes(num_blocks),
        max_model_len=facts.max_model_len,
        deliver=engine.deliver,
    )
    task = asyncio.create_task(core.run())
    engine.add_core(core)
    yield engine
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def over_grpc(config: EngineConfig, timeline: Timeline) -> AsyncIterator[Engine]:
    async with running_scheduler(config, timeline=timeline) as scheduler:
        worker = spawn_service("pagoda_worker", ["--scheduler", scheduler.address], env={"PAGODA_LOG_LEVEL": "error"})
        try:
            await scheduler.until(lambda: scheduler.engine.is_ready, timeout_s=300)
            yield scheduler.engine
        finally:
            await asyncio.to_thread(stop_process, worker, timeout_s=10)


async def measure(report: Report, args: Any, model: str, name: str, batch_sizes: list[int]) -> None:
    vocab_size = 3000
    for num_seqs in batch_sizes:
        config = make_config(model, num_seqs, is_async=not args.no_async_scheduling, device=args.device)
        num_steps = args.steps * (3 if num_seqs <= SMALL_BATCH else 1)
        timeline = MeanTimeline(num_seqs)
        seconds: dict[str, list[float]] = {"in_process": [], "grpc": []}
        cpu: list[float] = []
        wire: list[float] = []
        async with in_process(config) as local, over_grpc(config, timeline) as remote:
            for number in range(args.rounds):
                turns = [("in_process", local), ("grpc", remote)]
                for kind, engine in turns if number % 2 else reversed(turns):
                    times, per_step, num_bytes = await decode(engine, num_seqs, num_steps, vocab_size)
                    seconds[kind].append(median(times))
                    if engine is remote:
                        cpu.append(per_step)
                        wire.append(num_bytes)
        print(f"{name} {num_seqs}, stages of a step over gRPC, ms: {timeline.describe()}")
        n = args.rounds * num_steps
        for kind, values in seconds.items():
            report.add(f"{kind}_ms_{name}_{num_seqs}", 1e3 * median(values), "ms", n=n)
        ratios = [grpc / ours for grpc, ours in zip(seconds["grpc"], seconds["in_process"], strict=True)]
        report.add(f"ratio_{name}_{num_seqs}", median(ratios), "gRPC / in-process", n=n)
        if num_seqs == 256 and name == "tiny":
            report.add("scheduler_ms_per_step_256", 1e3 * median(cpu), "ms CPU of the process, gRPC included", n=n)
            own_ms = timeline.own_ms
            report.add("scheduler_stages_ms_per_step_256", own_ms, "ms: schedule, encode, decode, deliver", n=n)
            report.add("bytes_per_step_256", median(wire), "bytes both ways, median step", n=n)


async def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--steps", type=int, default=60, help="decode steps of a turn; x 3 for small batches")
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    flags.add_argument(
        "--models", nargs="+", choices=["tiny", "forward5ms", *GPU_SHAPES], default=["tiny", "forward5ms"]
    )
    flags.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    flags.add_argument("--no-async-scheduling", action="store_true", help="wait for each step's result")
    flags.set_defaults(rounds=7)
    args = flags.parse_args()
    report = Report(args.json)
    if "tiny" in args.models:
        await measure(report, args, EMBEDDED_MODEL, "tiny", args.batch_sizes)
    for name in sorted({*args.models} - {"tiny"}):
        with tempfile.TemporaryDirectory() as directory:
            await measure(report, args, make_model(name, Path(directory)), name, args.batch_sizes)


def run_as_a_scheduler() -> None:
    """Start again with the environment that a scheduler gets (memory allocator, gRPC), unless it is there; with that of
    a worker as well (how threads wait), as one computes in here."""
    environment = service_environment(service_command("pagoda_scheduler", []))
    set_wait_policy(environment)
    if environment.items() > os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


if __name__ == "__main__":
    run_as_a_scheduler()
    uvloop.run(main())
