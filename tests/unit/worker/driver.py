"""Drives a ModelRunner as a scheduler would, with the simplest allocator there is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.steps.step import BadSlot, NewRequest, PromptLogprobs, StepInput, StepOutput
from pagoda_worker.worker import Worker
from tests.unit.worker.parallel.ranks import Ranks


@dataclass
class Tracked:
    """One sequence as the driver knows it."""

    slot: int
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    output: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    bad: BadSlot | None = None
    computed: int = 0
    num_blocks: int = 0
    lora: int = 0
    num_given_back: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Blocks that left the window, by the layers of the group."""

    @property
    def is_done(self) -> bool:
        return self.bad is not None or len(self.output) >= self.max_tokens


class Driver:
    """A loaded worker and free blocks in random order."""

    def __init__(
        self,
        model: str | Path,
        *,
        num_blocks: int = 600,
        block_size: int = 16,
        max_num_seqs: int = 64,
        dtype: Any = "float32",
        speculative: SpeculativeConfig | None = None,
        kv_cache_dtype: Any = "auto",
        world_size: int = 1,
        device: Any = "cpu",
        worker: Worker | None = None,
        by_groups: bool = True,
        lora: LoraConfig | None = None,
        **model_options: Any,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(model=str(model), dtype=dtype, device=device, **model_options),
            cache=CacheConfig(block_size=block_size, kv_cache_memory_bytes=1 << 30, kv_cache_dtype=kv_cache_dtype),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
            speculative=speculative or SpeculativeConfig(),
            lora=lora or LoraConfig(),
        )
        self.worker = worker or (Worker(num_threads=1) if world_size == 1 else Ranks(world_size))
        self.worker.init_device(config, takes_cache_groups=by_groups)
        self.facts = self.worker.load_model(lambda loaded, total: None)
        self.worker.initialize_cache(num_blocks=num_blocks, num_cpu_blocks=4)
        self.block_size = block_size
        self.groups = self.worker.cache_layout.groups
        self.num_lookahead = config.speculative.num_speculative_tokens
        """Draft tokens that every sequence may try in a decode; the driver's default is what the config allows."""
        self.num_reserved = self.num_lookahead
        """Tokens ahead that have blocks."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        """Accepted draft tokens."""
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self._held: dict[int, list[list[int]]] = {}
        """Of each slot, by group; those that left a window are None."""
        self.num_reused = 0
        """Blocks that left the window of a sequence that went on."""
        self._to_free: list[int] = []

    def load_adapter(self, number: int, path: Path) -> None:
        """Have an adapter under a number, on every rank."""
        name = LoraAdapter(name=path.name, path=str(path))
        for worker in self.worker.workers if isinstance(self.worker, Ranks) else (self.worker,):
            assert worker.adapters is not None
            worker.adapters.load(number, name)

    def execute(self, **step: Any) -> StepOutput:
        """One step; free slots of ended sequences first."""
        freed, self._to_free = self._to_free, []
        return self.worker.execute_model(StepInput(freed_slots=np.array(freed, dtype=np.int64), **step))

    def take_blocks(self, slot: int, count: int) -> list[list[int]]:
        """Blocks for a slot, by group."""
        blocks = [[self._free.pop() for _ in range(count)] for _ in self.groups]
        held = self._held.setdefault(slot, [[] for _ in self.groups])
        for more, of_group in zip(blocks, held, strict=True):
            of_group.extend(more)
        return blocks

    def give_blocks_back(self, sequence: Tracked) -> None:
        """Blocks that left a window are the next ones to be taken, by any group."""
        for held, group in zip(self._held.get(sequence.slot, []), self.groups, strict=True):
            num_left = 0 if group.window is None else max(0, sequence.computed - group.window + 1) // self.block_size
            for place in range(sequence.num_given_back.get(group.layers, 0), num_left):
                self._free.append(held[place])
                held[place] = -1
                self.num_reused += 1
            sequence.num_given_back[group.layers] = num_left

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int = 16,
        chunk: int = 10_000,
        budget: int = 10_000,
        slots: Sequence[int] | None = None,
        outputs: Sequence[Sequence[int]] | None = None,
        loras: Sequence[int] | None = None,
    ) -> list[Tracked]:
        """Run prompts to the end, together: running sequences first, at most `chunk` prompt tokens of one and
        `budget` tokens of all in a step.

        Args:
            outputs: output tokens that are known already (a resumed request).
            loras: number of each prompt's adapter; 0 is none.
        """
        params = SamplingParams(temperature=0, max_tokens=max_tokens) if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        sequences = [
            Tracked(slot, list(prompt), one, max_tokens, output=list(known), lora=lora)
            for slot, prompt, one, known, lora in zip(
                slots or range(len(prompts)),
                prompts,
                each,
                outputs or [[] for _ in prompts],
                loras or [0] * len(prompts),
                strict=True,
            )
        ]
        started: set[int] = set()
        while any(not sequence.is_done for sequence in sequences):
            self._step(sequences, started, chunk, budget)
        for sequence in sequences:
            held = self._held.pop(sequence.slot, [])
            self._free.extend(block for of_group in held for block in of_group if block >= 0)
            self._to_free.append(sequence.slot)
        return sequences

    def _step(self, sequences: list[Tracked], started: set[int], chunk: int, budget: int) -> None:
        new, batch, counts, appended, lookahead = [], [], [], [], []
        for sequence in sequences:
            known = len(sequence.prompt) + len(sequence.output)
            count = min(known - sequence.computed, chunk, budget - sum(counts))
            if sequence.is_done or count <= 0:
                continue
            lookahead.append(self.num_lookahead if count == 1 else 0)
            num_tokens = sequence.computed + count + (self.num_reserved if count == 1 else 0)
            blocks = self.take_blocks(sequence.slot, max(0, -(-num_tokens // self.block_size) - sequence.num_blocks))
            # None at all: the model keeps states alone.
            first, num_others = blocks[0] if blocks else [], max(0, len(blocks) - 1)
            sequence.num_blocks += len(first)
            if sequence.slot in started:
                appended += [(sequence.slot, block, group) for group, part in enumerate(blocks) for block in part]
            else:
                started.add(sequence.slot)
                new.append(
                    NewRequest(
                        slot=sequence.slot,
                        request_id=f"r{sequence.slot}",
                        prompt_token_ids=np.array(sequence.prompt),
                        output_token_ids=np.array(sequence.output, dtype=np.int64),
                        sampling_params=sequence.params,
                        block_ids=np.array(first, dtype=np.int64),
                        group_block_ids=np.array(blocks[1:], dtype=np.int64).reshape(num_others, len(first)),
                        eos_token_ids=self.facts.eos_token_ids,
                        lora_number=sequence.lora,
                    )
                )
            batch.append(sequence)
            counts.append(count)
        output = self.execute(
            new_requests=new,
            appended_slots=np.array([slot for slot, _, _ in appended], dtype=np.int64),
            appended_block_ids=np.array([block for _, block, _ in appended], dtype=np.int64),
            appended_groups=np.array([group for _, _, group in appended], dtype=np.int64),
            num_seqs=len(batch),
            slots=np.array([sequence.slot for sequence in batch]),
            num_scheduled_tokens=None if all(count == 1 for count in counts) else np.array(counts),
            num_lookahead_tokens=np.array(lookahead) if any(lookahead) else None,
        )
        if output.num_draft_tokens is not None:
            self.num_draft_tokens += int(output.num_draft_tokens.sum())
            if output.num_sampled_tokens is not None:
                self.num_accepted_tokens += int(np.maximum(output.num_sampled_tokens - 1, 0).sum())
        self._update(batch, counts, output)
        for sequence in batch:
            self.give_blocks_back(sequence)

    @staticmethod
    def _update(batch: list[Tracked], counts: list[int], output: StepOutput) -> None:
        by_slot = {sequence.slot: sequence for sequence in batch}
        for bad in output.bad_slots:
            by_slot[bad.slot].bad = bad
        for chunk in output.prompt_logprobs:
            by_slot[chunk.slot].prompt_logprobs.append(chunk)
        sampled = np.ones(len(batch), int) if output.num_sampled_tokens is None else output.num_sampled_tokens
        tokens, row_owner = iter(output.token_ids.tolist()), []
        for sequence, count, num_sampled in zip(batch, counts, sampled.tolist(), strict=True):
            sequence.computed += count
            sequence.computed += max(num_sampled - 1, 0)  # draft tokens that were right
            for _ in range(num_sampled):
                sequence.output.append(next(tokens))
                row_owner.append(sequence)
        if output.logprobs is not None:
            columns, at = output.logprobs, 0
            for row, count, rank in zip(columns.rows, columns.counts, columns.sampled_ranks, strict=True):
                entries = slice(at, at + int(count))
                at += int(count)
                pairs = zip(columns.token_ids[entries].tolist(), columns.logprobs[entries].tolist(), strict=True)
                row_owner[int(row)].logprobs.append(dict(pairs))
                row_owner[int(row)].ranks.append(int(rank))
