"""Steps as continuous batching makes them: decodes, and in each a part of some prompt; with the time for which the
device has nothing to do."""

import itertools
import json
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np

from benchmarks.gpu.steps import BLOCK_SIZE, SHAPES, TINY, BusyTimes, make_worker
from benchmarks.gpu.tools.timing import Figures
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.steps.step import NewRequest, StepInput
from pagoda_worker.worker import Worker

NUM_PARTS = 4
"""Parts of each prompt."""
DELAY_CYCLES = 60_000_000
"""Of the device's clock, about 30 ms: more than the host takes to launch a step."""


def measure_mixed_steps(figures: Figures, name: str, *, is_small: bool) -> None:
    """One step after the other and overlapping; `idle` is the share of a step without work for the device."""
    config = SHAPES[name] | (TINY if is_small else {})
    loads = ((3, 20, 7),) if is_small else ((64, 1024, 256), (64, 1024, 1024), (128, 1024, 512))
    num_steps = 9 if is_small else 30
    longest = max(max(length, NUM_PARTS * part) for _, length, part in loads) + num_steps + 1
    num_blocks = max(batch * num_blocks_each(length, part, num_steps) for batch, length, part in loads)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        worker = make_worker(directory, figures.device, num_blocks, longest)
    for (batch, length, part), samples in itertools.product(loads, (False, True)):
        steps = mixed_load(batch=batch, length=length, part=part, num_steps=num_steps, samples=samples)
        busy = BusyTimes(worker, figures.device, delay_cycles=DELAY_CYCLES)
        _run(worker, steps, overlaps=False)
        busy_seconds = busy.median()
        for overlaps in (False, True):
            times = _run(worker, steps, overlaps=overlaps)[num_steps // 5 :]
            how = f"{', sampled' * samples}{', overlapping' * overlaps}"
            case = f"{batch - 1} of {length} tokens, a part of {part}{how}"
            figures.add(f"{name} mixed step", case, statistics.median(times), busy_seconds=busy_seconds)


def num_blocks_each(length: int, part: int, num_steps: int) -> int:
    """KV-cache blocks of each slot."""
    return -(-(max(length, NUM_PARTS * part) + num_steps + 1) // BLOCK_SIZE)


def mixed_load(*, batch: int, length: int, part: int, num_steps: int, samples: bool = False) -> list[StepInput]:
    """`batch` decodes in the first step, then one fewer and `part` tokens of a prompt in each. When a prompt is
    computed its sequence decodes with the others, the one that came first leaves, and the next has its slot and its
    blocks.

    Args:
        length: tokens of the first sequences, whose keys and values do not matter.
        samples: tokens are drawn, with top-p and a penalty; otherwise they are the likeliest.
    """
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    if samples:
        params = SamplingParams(
            temperature=0.8, top_p=0.95, seed=1, frequency_penalty=0.1, max_tokens=4000, ignore_eos=True
        )
    num_blocks = num_blocks_each(length, part, num_steps)

    def request(slot: int, num_tokens: int, num_computed: int) -> NewRequest:
        return NewRequest(
            slot=slot,
            request_id=str(slot),
            prompt_token_ids=(np.arange(num_tokens) + slot) % 200,
            sampling_params=params,
            block_ids=np.arange(slot * num_blocks, (slot + 1) * num_blocks),
            num_computed_tokens=num_computed,
        )

    first = [request(slot, length, length - 1) for slot in range(batch)]
    steps = [StepInput(new_requests=first, num_seqs=batch, slots=np.arange(batch))]
    decoding = list(range(batch))
    for number in range(num_steps):
        is_new = number % NUM_PARTS == 0
        if is_new:
            joining = decoding.pop(0)
        steps.append(
            StepInput(
                freed_slots=np.array([joining] if is_new else [], dtype=np.int64),
                new_requests=[request(joining, NUM_PARTS * part, 0)] if is_new else [],
                num_seqs=batch,
                slots=np.array([*decoding, joining]),
                num_scheduled_tokens=np.array([*[1] * (batch - 1), part]),
            )
        )
        if number % NUM_PARTS == NUM_PARTS - 1:
            decoding.append(joining)
    return steps


def _run(worker: Worker, steps: list[StepInput], *, overlaps: bool) -> list[float]:
    """Seconds from each step's end to the next one's. `overlaps`: the next step is there when one begins."""
    ends = []
    begun = deque([worker.begin(steps[0])] if overlaps else [])
    for step in steps[overlaps:]:
        begun.append(worker.begin(step))
        begun.popleft().result()  # of this step, or of the one before
        ends.append(time.perf_counter())
    while begun:
        begun.popleft().result()
        ends.append(time.perf_counter())
    worker.execute_model(StepInput(freed_slots=np.arange(steps[0].num_seqs)))
    return np.diff(ends).tolist()
