"""Steps as a scheduler sends them ahead of their answers, made by chance; and two ways to run them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.steps.pending_step import PendingStep
from pagoda_worker.steps.step import IntArray, NewRequest, StepInput, StepOutput
from pagoda_worker.worker import Worker

BLOCK_SIZE = 4
NUM_BLOCKS = 140
MAX_NUM_SEQS = 8


def ints(values: Sequence[object]) -> IntArray:
    return np.array(values, dtype=np.int64)


@dataclass
class Scripted:
    """A sequence, whose tokens no one has to know but for its prompt's."""

    slot: int
    prompt: list[int]
    blocks: list[int]
    num_computed: int
    """Tokens, those of all steps so far."""
    num_tokens: int
    """Those that these steps sample included."""


@dataclass
class Script:
    """Makes steps: sequences join, some with the prefix of another one, are computed in parts, decode, pause, end, and
    are preempted; what they leave may go to others at once."""

    seed: int
    params: Sequence[SamplingParams]
    joins: float = 0.1
    """Share of steps in which sequences join."""
    chunks: bool = False
    """Prompts are long, and computed in parts."""
    shares: bool = False
    """Prefixes are shared, also those that the step before computes; some sequences fork."""
    steps: list[StepInput] = field(default_factory=list)
    num_mixed: int = 0
    """Steps with parts of prompts beside decodes."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._free = list(range(NUM_BLOCKS))
        self._num_owners = [0] * NUM_BLOCKS
        self._running: list[Scripted] = []
        self._left: list[Scripted] = []
        """In this step."""
        self._copies: list[tuple[int, int]] = []
        self._last_slots: list[int] = []

    def add(self, num_steps: int) -> "Script":
        """More steps."""
        for _ in range(num_steps):
            self._add_step()
        return self

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop(0) for _ in range(count)]
        for block in taken:
            self._num_owners[block] = 1
        return taken

    def _give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self._num_owners[block] -= 1
        left = [block for block in blocks if not self._num_owners[block]]
        self._free = left + self._free if self._chance(0.5) else self._free + left

    def _add_step(self) -> None:
        new: list[NewRequest] = []
        self._copies = []
        self._left = [one for one in self._running if self._chance(0.04) or one.num_tokens > 40]
        for sequence in self._left:
            self._running.remove(sequence)
            self._give_back(sequence.blocks)
        if (not self._running or self._chance(self.joins)) and len(self._running) < MAX_NUM_SEQS:
            new = [self._join() for _ in range(self._random.randint(1, MAX_NUM_SEQS - len(self._running)))]
        fresh = {request.slot for request in new}
        if self._running and self._chance(0.05):
            self._random.shuffle(self._running)
        batch = [one for one in self._running if one.slot in fresh or not self._chance(0.02)]
        counts, appended = [], []
        for one in batch:
            count = one.num_tokens - one.num_computed
            if self.chunks and count > 1 and self._chance(0.7):
                count = self._random.randint(1, count - 1)
            one.num_computed += count
            counts.append(count)
            while one.num_computed > len(one.blocks) * BLOCK_SIZE:
                one.blocks += self._take(1)
                appended.append((one.slot, one.blocks[-1]))
            one.num_tokens += one.num_computed == one.num_tokens
        slots = [one.slot for one in batch]
        is_same = slots == self._last_slots and self._chance(0.8)
        self._last_slots = slots
        is_part = [one.num_computed < one.num_tokens - 1 for one in batch]
        self.num_mixed += any(is_part) and not all(is_part)
        self.steps.append(
            StepInput(
                freed_slots=ints([one.slot for one in self._left]),
                new_requests=new,
                blocks_to_copy=ints(self._copies).reshape(-1, 2),
                appended_slots=ints([slot for slot, _ in appended]),
                appended_block_ids=ints([block for _, block in appended]),
                num_seqs=len(slots),
                slots=None if is_same else ints(slots),
                num_scheduled_tokens=None if all(count == 1 for count in counts) else ints(counts),
            )
        )

    def _join(self) -> NewRequest:
        slot = self._random.choice(sorted(set(range(MAX_NUM_SEQS)) - {one.slot for one in self._running}))
        prompt, blocks, num_known = self._forked() if self.shares and self._chance(0.3) else self._prompt()
        self._running.append(Scripted(slot, prompt, list(blocks), num_known, len(prompt)))
        return NewRequest(
            slot=slot,
            request_id=f"{self.seed}-{len(self.steps)}-{slot}",
            prompt_token_ids=ints(prompt),
            sampling_params=self._random.choice(self.params),
            block_ids=ints(blocks),
            num_computed_tokens=num_known,
            eos_token_ids=(2,),
        )

    def _prompt(self) -> tuple[list[int], list[int], int]:
        """A prompt, its blocks, and how many of its tokens stand in them."""
        lengths = [1, 5, 13, 22, 30] if self.chunks else [1, 1, 2, 5, 13]
        known, blocks = self._shared() if self.shares and self._chance(0.5) else ([], [])
        prompt = known + [self._random.randint(3, 2000) for _ in range(self._random.choice(lengths))]
        return prompt, blocks + self._take(-(-len(prompt) // BLOCK_SIZE) - len(blocks)), len(known)

    def _forked(self) -> tuple[list[int], list[int], int]:
        """As `_prompt`, those of someone up to the last token; the block that has it is copied."""
        parents = [one for one in self._running if one.num_computed >= len(one.prompt)]
        if not parents:
            return self._prompt()
        parent = self._random.choice(parents)
        num_full, rest = divmod(len(parent.prompt) - 1, BLOCK_SIZE)
        blocks = parent.blocks[:num_full]
        for block in blocks:
            self._num_owners[block] += 1
        blocks += self._take(1)
        if rest:
            self._copies.append((parent.blocks[num_full], blocks[-1]))
        return list(parent.prompt), blocks, len(parent.prompt) - 1

    def _shared(self) -> tuple[list[int], list[int]]:
        """The part of someone's prompt that stands in full blocks, and these; of one who runs, or has just left."""
        if not self._running + self._left:
            return [], []
        other = self._random.choice(self._running + self._left)
        blocks = other.blocks[: min(other.num_computed, len(other.prompt)) // BLOCK_SIZE]
        if other in self._left:
            is_there = [*(block in self._free for block in blocks), False]
            blocks = blocks[: is_there.index(False)]
        for block in blocks:
            self._num_owners[block] += 1
            if block in self._free:
                self._free.remove(block)
        return other.prompt[: len(blocks) * BLOCK_SIZE], blocks


def run_one_by_one(worker: Worker, steps: Sequence[StepInput]) -> list[StepOutput]:
    """Each step when the one before has ended."""
    return [worker.execute_model(step) for step in steps]


def run_ahead(worker: Worker, steps: Sequence[StepInput]) -> tuple[list[StepOutput], int]:
    """Each step as early as the worker takes it; and how many began while another one was in flight."""
    outputs: list[StepOutput] = []
    begun: list[PendingStep] = []
    num_ahead = 0
    for step in steps:
        while not worker.can_begin(step):
            outputs.append(begun.pop(0).result())
        begun.append(worker.begin(step))
        num_ahead += sum(one.is_in_flight for one in begun) == 2
        if len(begun) > 1:
            outputs.append(begun.pop(0).result())
    return outputs + [one.result() for one in begun], num_ahead


def told(output: StepOutput) -> object:
    """All that is said of a step but for its timings."""
    counts = output.num_sampled_tokens
    asked = output.logprobs
    columns = () if asked is None else (asked.rows, asked.counts, asked.token_ids, asked.logprobs, asked.sampled_ranks)
    return (
        None if counts is None else counts.tolist(),
        output.token_ids.tolist(),
        output.bad_slots,
        [column.tolist() for column in columns],
    )
