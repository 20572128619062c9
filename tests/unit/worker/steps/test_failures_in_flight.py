"""Sequences, steps and devices that fail while the next step is in flight."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from pagoda_common.errors import Code, PagodaError, StaleEpoch
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.memory.transfers import Download
from pagoda_worker.sampling.logits_state import LogitsBatch
from pagoda_worker.steps.step import StepInput
from pagoda_worker.worker import Worker
from tests.unit.worker.steps.overlap import (
    GREEDY,
    LAUNCHED,
    assert_told_alike,
    empty_cache,
    make_worker,
    poison,
    request,
    start,
)
from tests.unit.worker.steps.step_scripts import NUM_BLOCKS, Script, ints, run_ahead, run_one_by_one, told

IMPOSSIBLE = SamplingParams(temperature=0, min_tokens=3, allowed_token_ids=[2])
"""All that is allowed is the end, which may not come yet."""


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("seed", range(40, 43))
def test_a_nan_that_is_heard_of_when_the_next_step_is_in_flight_ends_that_sequence_alone(
    seed: int, chunks: bool
) -> None:
    one_by_one, ahead = (make_worker(overlaps=overlaps) for overlaps in (False, True))
    steps = Script(seed, LAUNCHED, joins=0.3 if chunks else 0.1, chunks=chunks).add(80).steps
    in_prompts = np.concatenate([one.prompt_token_ids for step in steps for one in step.new_requests])
    sampled = np.concatenate([output.token_ids for output in run_one_by_one(one_by_one, steps)[10:]])
    token_ids, counts = np.unique(sampled, return_counts=True)
    is_rare = (counts <= np.sort(counts)[len(counts) // 3]) & ~np.isin(token_ids, in_prompts)
    poisoned = int(token_ids[is_rare][seed % 5])
    for worker in (one_by_one, ahead):
        poison(worker, poisoned)
    expected = run_one_by_one(one_by_one, steps)
    outputs, num_ahead = run_ahead(ahead, steps)
    assert [told(output) for output in outputs] == [told(output) for output in expected]
    bad = [one for output in outputs for one in output.bad_slots]
    assert bad
    assert all("no finite logits" in one.message and one.code == Code.INTERNAL for one in bad)
    assert num_ahead > 10
    for worker in (one_by_one, ahead):
        runner = worker._runner
        assert runner is not None
        caches = (*runner._kv_cache.k_caches, *runner._kv_cache.v_caches)
        assert all(bool(torch.isfinite(cache).all()) for cache in caches)


Spoiled = Callable[[Worker, Callable[[int], list[int]]], None]


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Spoiled:
    """The n-th step that a worker launches has NaN logits in some rows."""
    return partial(_spoil, monkeypatch)


def _spoil(monkeypatch: pytest.MonkeyPatch, worker: Worker, is_spoiled: Callable[[int], list[int]]) -> None:
    runner = worker._runner
    assert runner is not None
    launch, num_launched = runner._sampler.launch, 0

    def spoil(logits: torch.Tensor, batch: LogitsBatch, **options: object) -> torch.Tensor:
        nonlocal num_launched
        num_launched += 1
        rows = is_spoiled(num_launched)
        logits = logits.clone()
        logits[rows] = torch.nan
        return launch(logits, batch)

    monkeypatch.setattr(runner._sampler, "launch", spoil)


def test_log_probabilities_of_a_sequence_that_fails_are_left_out(ahead: Worker, spoiled: Spoiled) -> None:
    params = SamplingParams(temperature=0, logprobs=1)
    first = start(
        *(request(slot, [5 + slot], [4 * slot, 4 * slot + 1], params if slot else GREEDY) for slot in range(4))
    )
    decode = StepInput(num_seqs=4)
    expected = run_one_by_one(ahead, [first, decode])[1].logprobs
    empty_cache(ahead)
    spoiled(ahead, lambda number: [2] if number == 2 else [])
    outputs, _ = run_ahead(ahead, [first, decode, decode])
    found = [output.logprobs for output in outputs[1:]]
    assert expected is not None
    assert [None if columns is None else columns.rows.tolist() for columns in found] == [[1, 2]] * 2, "of three tokens"
    assert found[0] is not None
    for mine, theirs in ((found[0].token_ids, expected.token_ids), (found[0].logprobs, expected.logprobs)):
        assert mine.tolist() == [*theirs[:2].tolist(), *theirs[4:].tolist()]
    assert found[0].sampled_ranks.tolist() == expected.sampled_ranks[[0, 2]].tolist()


def test_a_sequence_fails_once_and_gives_no_token_afterwards(
    one_by_one: Worker, ahead: Worker, spoiled: Spoiled
) -> None:
    first = start(*(request(slot, [5 + slot], [4 * slot, 4 * slot + 1, 4 * slot + 2]) for slot in range(3)))
    decode = StepInput(num_seqs=3)
    expected = run_one_by_one(one_by_one, [first, *[decode] * 5])
    spoiled(ahead, lambda number: [1] if number == 3 else [])
    outputs, _ = run_ahead(ahead, [first, *[decode] * 5])
    counts = [None if output.num_sampled_tokens is None else output.num_sampled_tokens.tolist() for output in outputs]
    assert counts == [None, None, [1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1]]
    for output, right in zip(outputs[2:], expected[2:], strict=True):
        assert output.token_ids.tolist() == right.token_ids[[0, 2]].tolist()
        assert output.bad_slots == outputs[2].bad_slots, "told again to a scheduler that sent it again"
    assert outputs[2].bad_slots[0].message == "the model gave no finite logits for token 3"
    assert ahead.execute_model(StepInput(freed_slots=ints([1]), num_seqs=2, slots=ints([0, 2]))).bad_slots == []


def test_a_sequence_may_leave_before_it_is_known_to_have_failed(ahead: Worker, spoiled: Spoiled) -> None:
    first = start(*(request(slot, [5 + slot], [4 * slot, 4 * slot + 1, 4 * slot + 2]) for slot in range(2)))
    decode = StepInput(num_seqs=2)
    gone = StepInput(freed_slots=ints([1]), num_seqs=1, slots=ints([0]))
    spoiled(ahead, lambda number: [1] if number == 3 else [])
    steps = [first, decode, decode, gone, StepInput(num_seqs=1)]
    outputs, num_ahead = run_ahead(ahead, steps)
    assert num_ahead == 4, "nothing waited for it"
    assert [len(output.bad_slots) for output in outputs] == [0, 0, 1, 0, 0]
    again = ahead.execute_model(start(request(1, [9, 10], [4, 5])))
    assert (again.bad_slots, again.token_ids.size) == ([], 1)


@pytest.mark.parametrize("is_new", [False, True], ids=["who runs", "who comes"])
def test_blocks_of_a_sequence_in_flight_go_to_others_without_its_nan(is_new: bool) -> None:
    """It is not known to have failed when the next step is launched, in which another sequence has its block."""
    one_by_one, ahead = (make_worker(overlaps=overlaps) for overlaps in (False, True))
    for worker in (one_by_one, ahead):
        poison(worker, 77)
    bad = request(1, [8, 9, 77, 10], [1])
    first = start(request(0, [5, 6, 7], [0]))
    joins = StepInput(
        new_requests=[bad], num_seqs=2, slots=ints([0, 1]), num_scheduled_tokens=ints([1, bad.prompt_token_ids.size])
    )
    batch = [0, 1] if is_new else [0]
    handed_on = StepInput(
        freed_slots=ints([1]),
        new_requests=[request(1, [8, 9], [1])] if is_new else [],
        appended_slots=ints([0]),
        appended_block_ids=ints([2 if is_new else 1]),
        num_seqs=len(batch),
        slots=ints(batch),
        num_scheduled_tokens=ints([1, 2][: len(batch)]),
    )
    steps = [first, joins, handed_on, *[StepInput(num_seqs=len(batch))] * 2]
    assert assert_told_alike(one_by_one, ahead, steps) == 4
    expected = one_by_one.execute_model(StepInput())
    assert told(ahead.execute_model(StepInput())) == told(expected)
    for worker in (one_by_one, ahead):
        runner = worker._runner
        assert runner is not None
        assert all(bool(torch.isfinite(cache).all()) for cache in runner._kv_cache.v_caches)


@pytest.mark.parametrize(
    "step",
    [
        StepInput(freed_slots=ints([1]), num_seqs=2),
        StepInput(num_seqs=2, appended_slots=ints([0]), appended_block_ids=ints([9])),
    ],
    ids=["a row of an empty slot", "a row without a block"],
)
def test_a_row_that_contradicts_the_batch_is_a_bad_slot(one_by_one: Worker, ahead: Worker, step: StepInput) -> None:
    first = start(request(0, [5, 6, 7], [0]), request(1, [8, 9, 10], [1]))
    decode = StepInput(num_seqs=2)
    assert_told_alike(one_by_one, ahead, [first, decode, step, decode])
    assert 1 in [bad.slot for bad in ahead.execute_model(decode).bad_slots]


def test_a_step_that_cannot_be_fails_after_the_one_in_flight(one_by_one: Worker, ahead: Worker) -> None:
    first, decode = start(request(0, [5, 6, 7], [0, 1])), StepInput(num_seqs=1)
    wrong = StepInput(num_seqs=1, appended_slots=ints([0]), appended_block_ids=ints([NUM_BLOCKS]))
    expected = run_one_by_one(one_by_one, [first, decode])
    ahead.execute_model(first)
    sound, failed, refused = [ahead.begin(step) for step in (decode, wrong, decode)]
    assert told(sound.result()) == told(expected[1])
    with pytest.raises(PagodaError, match=f"block {NUM_BLOCKS} is not below"):
        failed.result()
    with pytest.raises(StaleEpoch, match="an earlier step failed"):
        refused.result()


def test_a_device_that_fails_takes_later_steps_along(ahead: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.execute_model(start(request(0, [5, 6, 7], [0, 1])))
    decode = StepInput(num_seqs=1)
    first, second = ahead.begin(decode), ahead.begin(decode)

    def broken(download: Download) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(Download, "wait", broken)
        with pytest.raises(PagodaError, match="illegal memory access"):
            first.result()
    with pytest.raises(StaleEpoch, match="illegal memory access"):
        second.result()
    with pytest.raises(StaleEpoch, match="illegal memory access"):
        ahead.execute_model(decode)
    empty_cache(ahead)
    assert ahead.execute_model(start(request(0, [5, 6, 7], [0, 1]))).token_ids.size == 1


def test_parameters_that_leave_no_token_are_the_requests_fault(one_by_one: Worker, ahead: Worker) -> None:
    new = [request(0, [5], [0]), request(1, [6], [1], IMPOSSIBLE)]
    steps = [StepInput(new_requests=new, num_seqs=2, slots=ints([0, 1])), StepInput(num_seqs=2)]
    assert_told_alike(one_by_one, ahead, steps)
    (bad,) = ahead.execute_model(StepInput(num_seqs=2)).bad_slots
    assert (bad.slot, bad.code) == (1, Code.INVALID_ARGUMENT)
