"""Two workers, one step after the other and overlapping, and what both are asked."""

from typing import Any

import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.models.layers import Linear
from pagoda_worker.steps.step import NewRequest, StepInput
from pagoda_worker.worker import Worker
from tests.unit.worker.driver import Driver
from tests.unit.worker.steps.step_scripts import (
    BLOCK_SIZE,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    ints,
    run_ahead,
    run_one_by_one,
    told,
)

GREEDY = SamplingParams(temperature=0, max_tokens=None)
LAUNCHED = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=1.3, seed=12, top_k=30, top_p=0.9),
    SamplingParams(temperature=1.0, seed=13, min_p=0.05, logit_bias={7: 2.0, 9: -3.0}),
    SamplingParams(temperature=0, min_tokens=6, logit_bias={2: 50.0}),
    SamplingParams(temperature=0.9, seed=14, allowed_token_ids=[5, 6, 7, 300, 301]),
    SamplingParams(temperature=0, presence_penalty=0.7, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, seed=16, frequency_penalty=1.5, bad_words_token_ids=[[9], [300]]),
]
"""Sampled without anything of the host's token log."""
WITH_LOGPROBS = [
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=1.0, seed=17, logprobs=0, presence_penalty=0.4),
]
WAITED_FOR = [
    SamplingParams(temperature=0.7, seed=15, bad_words_token_ids=[[9], [5, 6]]),
    SamplingParams(temperature=1.0, seed=18, bad_words_token_ids=[[5, 6]], logprobs=2),
]


def make_worker(*, overlaps: bool, **options: Any) -> Worker:
    """A worker with the sizes of scripts."""
    worker, sizes = Worker(num_threads=1, overlaps=overlaps), {"block_size": BLOCK_SIZE, "max_num_seqs": MAX_NUM_SEQS}
    Driver("pagoda-tiny", worker=worker, num_blocks=NUM_BLOCKS, **sizes, **options)
    return worker


def empty_cache(worker: Worker) -> None:
    """Forget every sequence."""
    worker.initialize_cache(num_blocks=NUM_BLOCKS, num_cpu_blocks=4)


def poison(worker: Worker, token_id: int) -> None:
    """Reading a token gives NaN; no other logits change."""
    model = worker._model
    assert model is not None
    table = model.embed_tokens
    head = Linear(in_features=table.columns, out_features=table.rows, bias=False)
    head.weight = torch.nn.Parameter(table.weight.detach().clone(), requires_grad=False)
    model.lm_head = head
    with torch.no_grad():
        table.weight[token_id] = torch.nan
    empty_cache(worker)  # with a runner that knows it


def request(
    slot: int, prompt: list[int], blocks: list[int], params: SamplingParams = GREEDY, output: tuple[int, ...] = ()
) -> NewRequest:
    return NewRequest(
        slot=slot,
        request_id=f"r{slot}",
        prompt_token_ids=ints(prompt),
        output_token_ids=ints(output),
        sampling_params=params,
        block_ids=ints(blocks),
        eos_token_ids=(2,),
    )


def start(*requests: NewRequest) -> StepInput:
    """A step that computes whole prompts."""
    return StepInput(
        new_requests=list(requests),
        num_seqs=len(requests),
        slots=ints([one.slot for one in requests]),
        num_scheduled_tokens=ints([one.prompt_token_ids.size + one.output_token_ids.size for one in requests]),
    )


def assert_told_alike(one_by_one: Worker, ahead: Worker, steps: list[StepInput]) -> int:
    """Both ways tell the same; how many steps began while another one was in flight."""
    expected = [told(output) for output in run_one_by_one(one_by_one, steps)]
    outputs, num_ahead = run_ahead(ahead, steps)
    assert [told(output) for output in outputs] == expected
    return num_ahead
