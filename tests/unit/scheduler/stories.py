"""A scheduler, and a pretend worker that computes tokens from token logs alone: what every story needs."""

from collections.abc import Callable, Sequence

import numpy as np

from pagoda_common.config.engine_config import CacheConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.adapters.adapter_pool import AdapterPool
from pagoda_scheduler.core.constraint_holds import ConstraintHolds
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import BadSlot, LogprobRows, ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheGroup, CacheSizes, has_states
from tests.unit.scheduler.pretend_caches import PretendBlocks, PretendStates

EOS = 57


def make_scheduler(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    max_model_len: int = 200,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    swap_block_ns: int = 0,
    num_speculative_tokens: int = 0,
    groups: Sequence[CacheGroup] = ONE_GROUP,
    num_snapshots: int = 0,
    num_host_snapshots: int = 0,
    snapshot_interval: int = 12,
    constraints: ConstraintHolds | None = None,
    adapters: AdapterPool | None = None,
    **scheduler: object,
) -> Scheduler:
    """A scheduler over pretend blocks."""
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **scheduler})  # type: ignore[arg-type]
    cache = CacheConfig(
        block_size=block_size, enable_prefix_caching=enable_prefix_caching, snapshot_interval=snapshot_interval
    )
    return Scheduler(
        config=config,
        cache=cache,
        sizes=CacheSizes(num_blocks, num_host_blocks, num_snapshots, num_host_snapshots),
        max_model_len=max_model_len,
        groups=groups,
        swap_block_ns=swap_block_ns,
        num_speculative_tokens=num_speculative_tokens,
        constraints=constraints,
        adapters=adapters,
    )


def make_request(name: str, prompt: list[int] | int, *, max_tokens: int | None = 4, **more: object) -> Request:
    """A request; a number as prompt means that many different tokens."""
    tokens = list(range(1000, 1000 + prompt)) if isinstance(prompt, int) else prompt
    fields = {
        key: more.pop(key)
        for key in ("stop_token_ids", "ignore_eos", "min_tokens", "structured_outputs")
        if key in more
    }
    params = SamplingParams(max_tokens=max_tokens, seed=0, **fields)  # type: ignore[arg-type]
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=params,
        max_model_len=200,
        eos_token_ids=(EOS,),
        **more,  # type: ignore[arg-type]
    )


class PretendWorker:
    """Keeps slots as a real worker does, checks every step against the contract, and samples the log's checksum.

    Of the draft tokens that a step allows, it tries and gets right as many as `guess` says.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        guess: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        """`guess`: draft tokens tried and right, given the most that may be tried; without it, all wrong."""
        self._guess = guess or (lambda most: (most, 0))
        self.num_tried = 0
        self.logs: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.blocks = PretendBlocks(groups=groups, block_size=block_size)
        self.states = PretendStates() if has_states(groups) else None
        self.bad: set[str] = set()
        self.names: dict[int, str] = {}
        self.logprobs: dict[int, int] = {}
        self.pooled: set[int] = set()
        """Slots whose embedding is wanted: what `embedding` says."""

    @staticmethod
    def next_token(log: list[int]) -> int:
        """The token after `log`: a function of the whole log, so that any loss or repetition shows."""
        return 10 + (sum(log) * 31 + len(log)) % 400

    @staticmethod
    def embedding(log: Sequence[int]) -> bytes:
        """A function of the whole log."""
        return np.array([len(log), sum(log)], dtype="<f4").tobytes()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step."""
        for slot in output.freed_slots:
            del self.logs[slot]
        self.blocks.move(output)
        if self.states is not None:
            self.states.move(output)
        for new in output.new_requests:
            assert new.slot not in self.logs, "a slot was given away twice"
            self.logs[new.slot] = [*new.prompt_token_ids, *new.output_token_ids]
            self.computed[new.slot] = new.num_computed_tokens
            self.blocks.start(new)
            self.names[new.slot] = new.request_id
            self.pooled.discard(new.slot)
            if new.pooling is not None:
                self.pooled.add(new.slot)
            self.logprobs[new.slot] = new.sampling_params.logprobs or 0
        self.blocks.append(output)
        if self.states is not None:
            self.states.start(output)
        drafts = self._draft(output)
        self._store(output, drafts)
        counts, tokens, bad = [], [], []
        embeddings: dict[int, bytes] = {}
        rows: list[int] = []
        top: list[tuple[list[int], list[float]]] = []
        for slot, count in zip(output.slots, output.num_scheduled_tokens, strict=True):
            if self._is_behind_end(slot, count):
                bad.append(BadSlot(slot, 13, "no block"))
                counts.append(0)
                continue
            self.computed[slot] += count
            log, start = self.logs[slot], self.computed[slot] - count
            if self.names[slot] in self.bad:
                if self.states is not None:
                    self.states.slots[slot] = tuple(log[: self.computed[slot]])  # as its blocks are written
                bad.append(BadSlot(slot, 13, "not a number"))
                counts.append(0)
                continue
            self.blocks.check(slot, log, start, self.computed[slot])
            if self.computed[slot] == len(log) and slot in self.pooled:
                embeddings[slot] = self.embedding(log)
                counts.append(0)
            elif self.computed[slot] == len(log):
                if self.logprobs[slot]:
                    rows.append(len(tokens))
                    top.append(likeliest(log, self.logprobs[slot]))
                    tokens.append(top[-1][0][0])
                else:
                    tokens.append(self.next_token(log))
                log.append(tokens[-1])
                num_right = drafts[slot][1]
                for _ in range(num_right):
                    tokens.append(self.next_token(log))
                    log.append(tokens[-1])
                self.computed[slot] += num_right
                counts.append(1 + num_right)
            else:
                assert self.computed[slot] < len(log), "scheduled beyond the known tokens"
                counts.append(0)
            if self.states is not None:
                self.states.advance(slot, log, start, self.computed[slot])
        if self.states is not None:
            self.states.save(output)
        return ModelRunnerOutput(
            output.step,
            counts,
            tokens,
            logprobs=_columns(rows, top),
            bad_slots=bad,
            num_draft_tokens=[drafts[slot][0] for slot in output.slots] if output.num_lookahead_tokens else None,
            pooled=embeddings,
        )

    def _draft(self, output: SchedulerOutput) -> dict[int, tuple[int, int]]:
        """Draft tokens that each slot tries and gets right."""
        drafts = dict.fromkeys(output.slots, (0, 0))
        columns = (output.slots, output.num_scheduled_tokens, output.num_lookahead_tokens or [])
        for slot, count, most in zip(*columns, strict=False):
            if most and self.names[slot] not in self.bad:
                capacity = self.blocks.capacity(slot)
                assert self.computed[slot] + count == len(self.logs[slot]), "drafts before the last known token"
                drafts[slot] = self._guess(max(0, min(most, capacity - len(self.logs[slot]))))
                self.num_tried += drafts[slot][0]
        return drafts

    def _is_behind_end(self, slot: int, count: int) -> bool:
        """Whether a sequence has outgrown its blocks, by draft tokens after an end that the scheduler will see."""
        return self.computed[slot] + count > self.blocks.capacity(slot)

    def _store(self, output: SchedulerOutput, drafts: dict[int, tuple[int, int]]) -> None:
        """Write every token of the batch into its block before anyone reads, draft tokens right or wrong too."""
        for slot, count in zip(output.slots, output.num_scheduled_tokens, strict=True):
            log, start = list(self.logs[slot]), self.computed[slot]
            if self._is_behind_end(slot, count):
                continue
            num_tried, num_right = drafts[slot]
            for place in range(num_tried):
                log.append(self.next_token(log) if place < num_right else -1)
            self.blocks.store(slot, log, start, start + count + num_tried, checks=self.names[slot] not in self.bad)


def likeliest(log: list[int], count: int) -> tuple[list[int], list[float]]:
    """The `count` likeliest of 60 tokens after `log`, and their log probabilities: a function of the whole log."""
    logits = np.random.default_rng([len(log), *log]).normal(size=60) * 2
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs)[:count]
    return best.tolist(), logprobs[best].astype(np.float32).tolist()


def _columns(rows: list[int], top: list[tuple[list[int], list[float]]]) -> LogprobRows | None:
    if not rows:
        return None
    token_ids = [[ids[0], *ids] for ids, _ in top]
    values = [[logprobs[0], *logprobs] for _, logprobs in top]
    return LogprobRows(
        rows=np.array(rows, dtype=np.uint32),
        counts=np.array([len(ids) for ids in token_ids], dtype=np.uint32),
        token_ids=np.concatenate(token_ids).astype(np.uint32),
        logprobs=np.concatenate(values).astype(np.float32),
        sampled_ranks=np.ones(len(rows), dtype=np.uint32),
    )


def expected_output(prompt: list[int], count: int) -> list[int]:
    """What an undisturbed run samples."""
    log = list(prompt)
    for _ in range(count):
        log.append(PretendWorker.next_token(log))
        if log[-1] == EOS:
            break
    return log[len(prompt) :]


def run(scheduler: Scheduler, worker: PretendWorker, *, window: int = 2, max_steps: int = 10_000) -> list[StepResult]:
    """Step until nothing is left, with `window` steps in flight."""
    results: list[StepResult] = []
    in_flight: list[SchedulerOutput] = []
    for _ in range(max_steps):
        while len(in_flight) < window and (output := scheduler.schedule()) is not None:
            in_flight.append(output)
        if not in_flight:
            assert not scheduler.has_unfinished_requests, "the scheduler is stuck"
            return results
        results.append(scheduler.update(worker.execute(in_flight.pop(0))))
    raise AssertionError("the scheduler does not come to an end")
