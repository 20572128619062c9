"""EngineCore: the step loop of one worker group and its scheduler. No gRPC, no messages."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.adapters.adapter_pool import AdapterPool
from pagoda_scheduler.core.constraint_holds import ConstraintHolds
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine.watchdog import StepWatchdog
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheGroup, CacheSizes
from pagoda_scheduler.observability.timeline import Timeline

WATCH_PERIOD_S = 0.25
SHORT_STEP_NS = 4_000_000
"""If steps take less time than this, one more step is sent ahead, because a process may wait 2 to 3 ms for a CPU,
longer than such a step."""


TRANSIENT = (Code.CANCELLED, Code.UNAVAILABLE)
"""gRPC codes of a worker that does not answer."""
LOAD_RETRY_S = 0.5


class Executor(Protocol):
    """Interface of a worker group for the step loop: steps are sent, results come back in the same order."""

    def send(self, output: SchedulerOutput) -> None:
        """Send a step; returns at once."""

    async def receive(self) -> ModelRunnerOutput:
        """The next result.

        Raises:
            PagodaError: the group is lost.
        """

    async def add_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Load an adapter in the group, concurrently with steps.

        Raises:
            PagodaError: the adapter cannot be used, or the group is lost.
        """


class ConstraintCompiler(Protocol):
    """Interface of a worker group that compiles constraints concurrently with steps."""

    async def hold_constraint(self, params: StructuredOutputsParams) -> None:
        """Compile a constraint, so that no step waits for it; it is kept until released.

        Raises:
            InvalidRequest: the constraint cannot be compiled.
            PagodaError: the worker did not answer.
        """

    def release_constraint(self, params: StructuredOutputsParams) -> None:
        """Release a constraint."""


class EngineCore:
    """One worker group, its scheduler, and the step loop over both."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        executor: Executor,
        sizes: CacheSizes,
        max_model_len: int,
        deliver: Callable[[StepResult], None],
        groups: Sequence[CacheGroup] = ONE_GROUP,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        swap_block_ns: int = 0,
        can_speculate: bool = False,
        compiler: ConstraintCompiler | None = None,
        can_adapt: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        """`can_speculate`: the group supports drafts, which the config may enable; `compiler`: None if steps wait for
        constraints; `can_adapt`: the group supports LoRA adapters."""
        self.eos_token_ids = tuple(eos_token_ids)
        """The model's end tokens."""
        self._compiler = compiler
        self._compilations: set[asyncio.Task[None]] = set()
        self._constraints: ConstraintHolds | None = None
        if compiler is not None:
            self._constraints = ConstraintHolds(start=self._start_compiling, release=compiler.release_constraint)
        lora = config.lora
        has_adapters = lora.enable_lora and can_adapt
        self.adapters = AdapterPool(max_loras=lora.max_loras, max_cpu_loras=lora.num_host) if has_adapters else None
        """None: sequences cannot have adapters."""
        self.scheduler = Scheduler(
            config=config.scheduler,
            cache=config.cache,
            sizes=sizes,
            max_model_len=max_model_len,
            groups=groups,
            vocab_size=vocab_size,
            swap_block_ns=swap_block_ns,
            num_speculative_tokens=config.speculative.num_speculative_tokens if can_speculate else 0,
            constraints=self._constraints,
            adapters=self.adapters,
        )
        self._loading: dict[asyncio.Task[None], LoraAdapter] = {}
        self.num_steps = 0
        """Counter: steps finished."""
        self._sends_ahead = config.scheduler.async_scheduling
        self._has_short_steps = False
        self._executor = executor
        self._timeline = timeline or Timeline()
        self._deliver = deliver
        self._num_in_flight = 0
        min_s = config.scheduler.step_watchdog_s
        self._watchdog = StepWatchdog(min_s=min_s) if min_s else None
        self._wake = asyncio.Event()
        self._last_progress_ns = time.monotonic_ns()

    @property
    def _window(self) -> int:
        """Maximum number of steps in flight."""
        return 2 + self._has_short_steps if self._sends_ahead else 1

    def step(self, answer: ModelRunnerOutput | None = None) -> None:
        """Take the oldest step's answer, if any, then send as many steps as the window allows."""
        if answer is not None:
            started_ns, result = time.perf_counter_ns(), StepResult(step=answer.step)
            self._timeline.answered(answer)
            try:
                self.scheduler.update(answer, result)
            finally:  # deliver applied tokens even after a failure
                self._deliver(result)
            self._timeline.delivered(answer, time.perf_counter_ns() - started_ns)
        while self._num_in_flight < self._window and (output := self._schedule()) is not None:
            self._executor.send(output)
            self._num_in_flight += 1

    def forget_constraints(self) -> bool:
        """Let the worker drop constraints that are not needed now; returns whether there were any."""
        has_forgotten = self.scheduler.forget_constraints()
        if has_forgotten:
            self._wake.set()
        return has_forgotten

    async def run(self) -> None:
        """Run steps until the group is lost.

        Raises:
            PagodaError: the worker group is lost.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._watch())
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    self.step()
        finally:
            for task in (*self._compilations, *self._loading):
                task.cancel()

    def _start_compiling(self, params: StructuredOutputsParams) -> None:
        compilation = asyncio.create_task(self._compile(params))
        self._compilations.add(compilation)
        compilation.add_done_callback(self._compilations.discard)

    async def _compile(self, params: StructuredOutputsParams) -> None:
        """Compile a constraint, then let its sequences run, or fail them."""
        assert self._compiler is not None
        assert self._constraints is not None
        try:
            await self._compiler.hold_constraint(params)
        except InvalidRequest as error:
            self._refuse(self._constraints.failed(params), error)
            return
        except PagodaError:
            pass  # a lost group fails its steps; otherwise the step reports the cause
        self.scheduler.put_back(self._constraints.compiled(params))
        self._wake.set()

    def _refuse(self, requests: list[Request], error: InvalidRequest) -> None:
        """End sequences whose constraint cannot be compiled."""
        ended: dict[Request, None] = {}
        for request in requests:
            ended.update(dict.fromkeys([request] if request.beam_group is None else request.beam_group.sequences))
        for request in ended:
            request.finish_reason, request.error = "error", error
            self.scheduler.finish(request)
        self._deliver(StepResult(step=0, finished=list(ended)))
        self._wake.set()

    # Adapters.

    async def load_adapter(self, adapter: LoraAdapter) -> None:
        """Load an adapter now; if there is no room for it, it is loaded when a request needs it.

        Raises:
            PagodaError: the adapter cannot be used, or the group is lost meanwhile.
        """
        if self.adapters is None:
            raise PagodaError("the worker group does not support adapters", code=Code.UNIMPLEMENTED)
        self.adapters.load(adapter)
        self._begin_loads(self.adapters)
        for task, loading in list(self._loading.items()):
            if loading.key == adapter.key:
                await asyncio.shield(task)

    def _begin_loads(self, adapters: AdapterPool) -> None:
        for number, adapter in adapters.take_loads():
            task = asyncio.create_task(self._load(number, adapter))
            self._loading[task] = adapter
            task.add_done_callback(self._end_load)

    def _end_load(self, task: asyncio.Task[None]) -> None:
        del self._loading[task]
        if not task.cancelled():
            task.exception()  # the requests got the error; other waiters get it from the task

    async def _load(self, number: int, adapter: LoraAdapter) -> None:
        """Load an adapter. Raises PagodaError after ending the requests that wait for it with that error."""
        assert self.adapters is not None, "it has asked"
        try:
            await self._executor.add_lora(number, adapter)
        except PagodaError as error:
            if error.code in TRANSIENT:  # the group is lost, or about to be: its requests move to others
                await asyncio.sleep(LOAD_RETRY_S)
                self.adapters.failed(adapter, (), error)
            elif failed := self.scheduler.fail_adapter(adapter, error):
                self._deliver(StepResult(step=0, finished=failed))
            raise
        else:
            self.adapters.loaded(adapter)
        finally:
            self._wake.set()

    async def warm_up(self) -> None:
        """Run one real token through the group, while `run` is running and before it serves requests."""
        done = asyncio.get_running_loop().create_future()
        deliver, self._deliver = self._deliver, lambda result: done.set_result(result)
        timeline, self._timeline = self._timeline, Timeline()  # keep this step out of the metrics: it is of no request
        params = SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True)
        model_len = self.scheduler.max_model_len
        request = Request(
            request_id="warm-up",
            prompt_token_ids=[0],
            sampling_params=params,
            max_model_len=model_len,
            pooling=PoolingParams() if self.scheduler.computes_whole else None,
        )
        self.add(request)
        result = await done
        self._deliver, self._timeline = deliver, timeline
        for failed in result.finished:
            if failed.error is not None:
                raise failed.error

    async def _receive(self) -> None:
        while True:
            answer = await self._executor.receive()
            self._note_answer(answer)
            self.step(answer)  # sent from here: waking `run` would cost another turn of the event loop

    def _note_answer(self, answer: ModelRunnerOutput) -> None:
        """The oldest step in flight was just answered."""
        self.num_steps += 1
        self._num_in_flight -= 1
        now_ns = time.monotonic_ns()
        if self._watchdog is not None:
            self._watchdog.answered((now_ns - self._last_progress_ns) / 1e9)
        self._last_progress_ns = now_ns
        if answer.timings is not None:
            self._has_short_steps = answer.timings.compute_ns < SHORT_STEP_NS

    def _schedule(self) -> SchedulerOutput | None:
        """Decide the next step, and note its time."""
        started_ns = time.perf_counter_ns()
        output = self.scheduler.schedule(time.time_ns())
        if self.adapters is not None:
            self._begin_loads(self.adapters)
        if output is None:
            return None
        self._timeline.scheduled(output, time.perf_counter_ns() - started_ns)
        if self._watchdog is not None:
            if not self._num_in_flight:
                self._last_progress_ns = time.monotonic_ns()
            self._watchdog.sent(output.num_tokens)
        return output

    async def _watch(self) -> None:
        """Raise NotReady when a step is overdue: the group hangs, and a late answer is not used."""
        looked_s = time.monotonic()
        while self._watchdog is not None:
            await asyncio.sleep(WATCH_PERIOD_S)
            now_s = time.monotonic()
            self._watchdog.tick(now_s - looked_s)
            looked_s = now_s
            if self._watchdog.is_overdue:
                raise NotReady(f"a step was not answered within {self._watchdog.bound_s:.1f} s: the worker hangs")

    def add(self, request: Request, *, at_front: bool = False) -> None:
        """Queue a sequence and wake the loop."""
        if not self.scheduler.has_unfinished_requests:
            self._last_progress_ns = time.monotonic_ns()
        self.scheduler.add(request, at_front=at_front)
        self._wake.set()

    def park(self, request: Request) -> None:
        """Do not compute a sequence until `unpark`."""
        self.scheduler.park(request)
        self._wake.set()

    def unpark(self, request: Request) -> None:
        """Compute a sequence again."""
        if not self.scheduler.has_unfinished_requests:
            self._last_progress_ns = time.monotonic_ns()
        self.scheduler.unpark(request)
        self._wake.set()

    def finish(self, request: Request) -> None:
        """End a sequence now."""
        self.scheduler.finish(request)
        self._wake.set()

    @property
    def silence_ms(self) -> int:
        """Milliseconds since the last result while there is work; 0 without work."""
        if not self.scheduler.has_unfinished_requests:
            return 0
        return (time.monotonic_ns() - self._last_progress_ns) // 1_000_000
