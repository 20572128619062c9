"""Steps launched before the tokens of the one before are known: nothing of what is told changes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_common.errors import Code, PagodaError, StaleEpoch
from pagoda_common.sampling_params import SamplingParams
from pagoda_worker.batch import ExecuteModelInput, NewRequest
from pagoda_worker.logits_state import LogitsBatch
from pagoda_worker.models.layers import Linear
from pagoda_worker.worker import Worker
from tests.unit.worker.driver import Driver
from tests.unit.worker.step_scripts import (
    BLOCK_SIZE,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    Script,
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
IMPOSSIBLE = SamplingParams(temperature=0, min_tokens=3, allowed_token_ids=[2])
"""All that is allowed is the end, which may not come yet."""


def make_driver(*, overlaps: bool, **options: Any) -> Driver:
    worker, sizes = Worker(num_threads=1, overlaps=overlaps), {"block_size": BLOCK_SIZE, "max_num_seqs": MAX_NUM_SEQS}
    return Driver("pagoda-tiny", worker=worker, num_blocks=NUM_BLOCKS, **sizes, **options)


@pytest.fixture(scope="module")
def one_by_one() -> Worker:
    worker = make_driver(overlaps=False).worker
    assert isinstance(worker, Worker)
    return worker


@pytest.fixture(scope="module")
def ahead() -> Worker:
    worker = make_driver(overlaps=True).worker
    assert isinstance(worker, Worker)
    return worker


@pytest.fixture(autouse=True)
def empty_caches(one_by_one: Worker, ahead: Worker) -> None:
    for worker in (one_by_one, ahead):
        worker._steps._steps.clear()  # of a test that has failed
        worker.initialize_cache(num_blocks=NUM_BLOCKS, num_cpu_blocks=4)


def poison(worker: Worker, token_id: int) -> None:
    """Whoever reads a token gets NaN; nobody's logits do otherwise."""
    model = worker._model
    assert model is not None
    table = model.embed_tokens
    head = Linear(in_features=table.columns, out_features=table.rows, bias=False)
    head.weight = torch.nn.Parameter(table.weight.detach().clone(), requires_grad=False)
    model.lm_head = head
    with torch.no_grad():
        table.weight[token_id] = torch.nan
    worker.initialize_cache(num_blocks=NUM_BLOCKS, num_cpu_blocks=4)  # with a runner that knows it


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


def start(*requests: NewRequest) -> ExecuteModelInput:
    """A step that computes whole prompts."""
    return ExecuteModelInput(
        new_requests=list(requests),
        num_seqs=len(requests),
        slots=ints([one.slot for one in requests]),
        num_scheduled_tokens=ints([one.prompt_token_ids.size + one.output_token_ids.size for one in requests]),
    )


def assert_told_alike(one_by_one: Worker, ahead: Worker, steps: list[ExecuteModelInput]) -> int:
    """Both ways tell the same; how many steps began while another one was in flight."""
    expected = [told(output) for output in run_one_by_one(one_by_one, steps)]
    outputs, num_ahead = run_ahead(ahead, steps)
    assert [told(output) for output in outputs] == expected
    return num_ahead


@pytest.mark.parametrize("seed", range(12))
def test_whatever_joins_ends_pauses_or_is_moved_the_tokens_are_the_same(
    one_by_one: Worker, ahead: Worker, seed: int
) -> None:
    steps = Script(seed, LAUNCHED).add(80).steps
    assert assert_told_alike(one_by_one, ahead, steps) > 30


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("seed", range(60, 68))
def test_steps_with_parts_of_prompts_run_ahead(one_by_one: Worker, ahead: Worker, seed: int, shares: bool) -> None:
    script = Script(seed, [*LAUNCHED, *WITH_LOGPROBS], joins=0.5, chunks=True, shares=shares).add(80)
    assert assert_told_alike(one_by_one, ahead, script.steps) == 79, "every step but the first"
    assert script.num_mixed > 15


@pytest.mark.parametrize("seed", range(20, 24))
def test_sequences_that_need_the_log_are_waited_for(one_by_one: Worker, ahead: Worker, seed: int) -> None:
    params = [*LAUNCHED, *LAUNCHED, *WAITED_FOR]
    steps = Script(seed, params, joins=0.2, chunks=seed % 2 == 0, shares=seed % 4 == 0).add(80).steps
    assert assert_told_alike(one_by_one, ahead, steps) > 0


@pytest.mark.parametrize("params", WAITED_FOR)
def test_nothing_runs_ahead_of_tokens_that_are_needed(
    one_by_one: Worker, ahead: Worker, params: SamplingParams
) -> None:
    steps = [start(request(0, [5, 6], [0, 1, 2, 3], params)), *[ExecuteModelInput(num_seqs=1)] * 10]
    assert assert_told_alike(one_by_one, ahead, steps) == 0


@pytest.mark.parametrize(
    ("mode", "is_launched"),
    [("raw_logprobs", True), ("raw_logits", True), ("processed_logprobs", False), ("processed_logits", False)],
)
def test_log_probabilities_come_with_the_tokens(mode: str, is_launched: bool) -> None:
    """As they are told one after the other. Those behind the rules and filters are waited for."""
    workers = [make_driver(overlaps=overlaps, logprobs_mode=mode, max_logprobs=-1).worker for overlaps in (False, True)]
    one_by_one, ahead = (worker for worker in workers if isinstance(worker, Worker))
    asked = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=1.0, seed=21, logprobs=3, top_k=5, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, seed=22, logprobs=-1, logit_bias={5: 3.0}),
        SamplingParams(temperature=1.0, seed=23, logprobs=3, logprob_token_ids=[7, 300, 5]),
    ]
    steps = Script(3, asked, joins=0.3, chunks=True).add(40).steps
    num_ahead = assert_told_alike(one_by_one, ahead, steps)
    assert num_ahead == 39 if is_launched else num_ahead < 20


def test_log_probabilities_of_a_sequence_that_fails_are_left_out(ahead: Worker, spoiled: "Spoiled") -> None:
    params = SamplingParams(temperature=0, logprobs=1)
    first = start(
        *(request(slot, [5 + slot], [4 * slot, 4 * slot + 1], params if slot else GREEDY) for slot in range(4))
    )
    decode = ExecuteModelInput(num_seqs=4)
    expected = run_one_by_one(ahead, [first, decode])[1].logprobs
    ahead.initialize_cache(num_blocks=NUM_BLOCKS, num_cpu_blocks=4)
    spoiled(ahead, lambda number: [2] if number == 2 else [])
    outputs, _ = run_ahead(ahead, [first, decode, decode])
    found = [output.logprobs for output in outputs[1:]]
    assert expected is not None
    assert [None if columns is None else columns.rows.tolist() for columns in found] == [[1, 2]] * 2, "of three tokens"
    assert found[0] is not None
    for mine, theirs in ((found[0].token_ids, expected.token_ids), (found[0].logprobs, expected.logprobs)):
        assert mine.tolist() == [*theirs[:2].tolist(), *theirs[4:].tolist()]
    assert found[0].sampled_ranks.tolist() == expected.sampled_ranks[[0, 2]].tolist()


@pytest.mark.parametrize("num_seqs", [1, 2, 5, 8])
def test_every_decode_of_a_batch_runs_ahead(one_by_one: Worker, ahead: Worker, num_seqs: int) -> None:
    requests = [
        request(slot, [20 + slot] * (1 + slot), list(range(6 * slot, 6 * slot + 6)), LAUNCHED[slot % len(LAUNCHED)])
        for slot in range(num_seqs)
    ]
    steps = [start(*requests), *[ExecuteModelInput(num_seqs=num_seqs)] * 14]
    assert assert_told_alike(one_by_one, ahead, steps) == 14, "all but the prompts, before which nothing is"


def test_a_preempted_sequence_comes_back_with_its_tokens(one_by_one: Worker, ahead: Worker) -> None:
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=None)
    decode, first = ExecuteModelInput(num_seqs=2), start(request(0, [5, 6], [0, 1, 2]), request(1, [7], [3, 4], seeded))
    one = request(1, [7], [3, 4], seeded)
    known = [output.token_ids[1] for output in run_one_by_one(one_by_one, [first, *[decode] * 4])]
    one_by_one.initialize_cache(num_blocks=NUM_BLOCKS, num_cpu_blocks=4)
    gone = ExecuteModelInput(freed_slots=ints([1]), num_seqs=1, slots=ints([0]))
    back = request(5, [7], [8, 9, 10], seeded, output=tuple(known))
    again = ExecuteModelInput(
        new_requests=[back], num_seqs=2, slots=ints([0, 5]), num_scheduled_tokens=ints([1, 1 + len(known)])
    )
    steps = [start(request(0, [5, 6], [0, 1, 2]), one), *[decode] * 4, gone, again, *[decode] * 3]
    assert assert_told_alike(one_by_one, ahead, steps) > 5


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("seed", range(40, 52))
def test_a_nan_that_is_heard_of_when_the_next_step_is_in_flight_ends_that_sequence_alone(
    seed: int, chunks: bool
) -> None:
    workers = [make_driver(overlaps=overlaps).worker for overlaps in (False, True)]
    one_by_one, ahead = (worker for worker in workers if isinstance(worker, Worker))
    steps = Script(seed, LAUNCHED, joins=0.3 if chunks else 0.1, chunks=chunks).add(80).steps
    in_prompts = np.concatenate([one.prompt_token_ids for step in steps for one in step.new_requests])
    sampled = np.concatenate([output.token_ids for output in run_one_by_one(one_by_one, steps)[10:]])
    token_ids, counts = np.unique(sampled, return_counts=True)
    is_rare = (counts <= np.sort(counts)[len(counts) // 3]) & ~np.isin(token_ids, in_prompts)
    poisoned = int(token_ids[is_rare][seed % 5])
    for worker in workers:
        poison(worker, poisoned)
    expected = run_one_by_one(one_by_one, steps)
    outputs, num_ahead = run_ahead(ahead, steps)
    assert [told(output) for output in outputs] == [told(output) for output in expected]
    bad = [one for output in outputs for one in output.bad_slots]
    assert bad
    assert all("no finite logits" in one.message and one.code == Code.INTERNAL for one in bad)
    assert num_ahead > 10
    for worker in workers:
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


def test_a_sequence_fails_once_and_gives_no_token_afterwards(
    one_by_one: Worker, ahead: Worker, spoiled: Spoiled
) -> None:
    first = start(*(request(slot, [5 + slot], [4 * slot, 4 * slot + 1, 4 * slot + 2]) for slot in range(3)))
    decode = ExecuteModelInput(num_seqs=3)
    expected = run_one_by_one(one_by_one, [first, *[decode] * 5])
    spoiled(ahead, lambda number: [1] if number == 3 else [])
    outputs, _ = run_ahead(ahead, [first, *[decode] * 5])
    counts = [None if output.num_sampled_tokens is None else output.num_sampled_tokens.tolist() for output in outputs]
    assert counts == [None, None, [1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1]]
    for output, right in zip(outputs[2:], expected[2:], strict=True):
        assert output.token_ids.tolist() == right.token_ids[[0, 2]].tolist()
        assert output.bad_slots == outputs[2].bad_slots, "told again to a scheduler that sent it again"
    assert outputs[2].bad_slots[0].message == "the model gave no finite logits for token 3"
    assert ahead.execute_model(ExecuteModelInput(freed_slots=ints([1]), num_seqs=2, slots=ints([0, 2]))).bad_slots == []


def test_a_sequence_may_leave_before_it_is_known_to_have_failed(ahead: Worker, spoiled: Spoiled) -> None:
    first = start(*(request(slot, [5 + slot], [4 * slot, 4 * slot + 1, 4 * slot + 2]) for slot in range(2)))
    decode = ExecuteModelInput(num_seqs=2)
    gone = ExecuteModelInput(freed_slots=ints([1]), num_seqs=1, slots=ints([0]))
    spoiled(ahead, lambda number: [1] if number == 3 else [])
    steps = [first, decode, decode, gone, ExecuteModelInput(num_seqs=1)]
    outputs, num_ahead = run_ahead(ahead, steps)
    assert num_ahead == 4, "nobody waited for it"
    assert [len(output.bad_slots) for output in outputs] == [0, 0, 1, 0, 0]
    again = ahead.execute_model(start(request(1, [9, 10], [4, 5])))
    assert (again.bad_slots, again.token_ids.size) == ([], 1)


@pytest.mark.parametrize("is_new", [False, True], ids=["who runs", "who comes"])
def test_blocks_of_a_sequence_in_flight_go_to_others_without_its_nan(is_new: bool) -> None:
    """It is not known to have failed when the next step is launched, in which another sequence has its block."""
    workers = [make_driver(overlaps=overlaps).worker for overlaps in (False, True)]
    one_by_one, ahead = (worker for worker in workers if isinstance(worker, Worker))
    for worker in workers:
        poison(worker, 77)
    bad = request(1, [8, 9, 77, 10], [1])
    first = start(request(0, [5, 6, 7], [0]))
    joins = ExecuteModelInput(
        new_requests=[bad], num_seqs=2, slots=ints([0, 1]), num_scheduled_tokens=ints([1, bad.prompt_token_ids.size])
    )
    batch = [0, 1] if is_new else [0]
    handed_on = ExecuteModelInput(
        freed_slots=ints([1]),
        new_requests=[request(1, [8, 9], [1])] if is_new else [],
        appended_slots=ints([0]),
        appended_block_ids=ints([2 if is_new else 1]),
        num_seqs=len(batch),
        slots=ints(batch),
        num_scheduled_tokens=ints([1, 2][: len(batch)]),
    )
    steps = [first, joins, handed_on, *[ExecuteModelInput(num_seqs=len(batch))] * 2]
    assert assert_told_alike(one_by_one, ahead, steps) == 4
    expected = one_by_one.execute_model(ExecuteModelInput())
    assert told(ahead.execute_model(ExecuteModelInput())) == told(expected)
    for worker in (one_by_one, ahead):
        runner = worker._runner
        assert runner is not None
        assert all(bool(torch.isfinite(cache).all()) for cache in runner._kv_cache.v_caches)


def test_a_slot_that_is_filled_anew_keeps_its_new_log(one_by_one: Worker, ahead: Worker) -> None:
    """The token of the sequence that was there comes later."""
    penalised = SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=1.5)
    first = start(request(0, [5, 6, 7], [0, 1]), request(1, [8], [2, 3]))
    decode = ExecuteModelInput(num_seqs=2)
    new = request(1, [11, 12, 13, 14, 15, 16], [4, 5, 6], penalised)
    chunk = ExecuteModelInput(freed_slots=ints([1]), new_requests=[new], num_seqs=2, num_scheduled_tokens=ints([1, 2]))
    rest = ExecuteModelInput(num_seqs=2, num_scheduled_tokens=ints([1, 4]))
    assert assert_told_alike(one_by_one, ahead, [first, decode, chunk, rest, *[decode] * 3]) == 6


@pytest.mark.parametrize(
    "moved",
    [
        {"blocks_to_copy": np.array([[0, 30]])},
        {"blocks_to_swap_out": np.array([[0, 1]])},
        {"blocks_to_swap_in": np.array([[1, 40]])},
        {"num_lookahead_tokens": np.array([1, 1])},
    ],
)
def test_a_step_that_moves_blocks_or_may_have_drafts_waits(
    one_by_one: Worker, ahead: Worker, moved: dict[str, Any]
) -> None:
    step = ExecuteModelInput(**({"num_seqs": 2} | moved))
    first = start(*(request(slot, [5 + slot], [4 * slot, 4 * slot + 1]) for slot in (0, 1)))
    assert assert_told_alike(one_by_one, ahead, [first, ExecuteModelInput(num_seqs=2), step]) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"num_scheduled_tokens": np.array([1, 1])},
        {"slots": np.array([0, 3])},
        {"slots": np.array([3, 1])},
        {"new_requests": [request(4, [5], [50])], "num_seqs": 3, "slots": np.array([0, 1, 4])},
        {"new_requests": [request(4, [5000000], [50])], "num_seqs": 3, "slots": np.array([4, 0, 1])},
        {"new_requests": [request(4, [5] * 9, [50, 51, 52])], "num_seqs": 1, "slots": np.array([4])},
        {"freed_slots": np.array([0]), "num_seqs": 1, "slots": np.array([1])},
    ],
)
def test_a_step_of_other_sequences_runs_ahead(one_by_one: Worker, ahead: Worker, other: dict[str, Any]) -> None:
    step = ExecuteModelInput(**({"num_seqs": 2} | other))
    first = start(*(request(slot, [5 + slot], [4 * slot, 4 * slot + 1]) for slot in (0, 1, 3)))
    steps = [first, ExecuteModelInput(num_seqs=2, slots=ints([0, 1])), step, ExecuteModelInput(num_seqs=step.num_seqs)]
    assert assert_told_alike(one_by_one, ahead, steps) == 3


def test_a_part_of_a_prompt_samples_nothing_and_its_parameters_may_wait(one_by_one: Worker, ahead: Worker) -> None:
    new = request(1, [8, 9, 10, 11], [1, 2, 3], WAITED_FOR[0])
    joins = ExecuteModelInput(new_requests=[new], num_seqs=2, slots=ints([0, 1]), num_scheduled_tokens=ints([1, 3]))
    alone = ExecuteModelInput(num_seqs=1, slots=ints([1]))
    steps = [start(request(0, [5, 6, 7], [0, 4])), joins, ExecuteModelInput(num_seqs=2), alone]
    assert assert_told_alike(one_by_one, ahead, steps) == 1, "it joins, and the prompt's end waits"


def test_log_probabilities_of_a_prompt_are_waited_for_until_it_is_computed(one_by_one: Worker, ahead: Worker) -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    first = start(request(0, [5, 6, 7], [0, 4]))
    joins = ExecuteModelInput(
        new_requests=[request(1, [8, 9, 10, 11], [1, 2, 3], params)],
        num_seqs=2,
        slots=ints([0, 1]),
        num_scheduled_tokens=ints([1, 3]),
    )
    decode = ExecuteModelInput(num_seqs=2)
    mixed = ExecuteModelInput(
        new_requests=[request(2, [8, 9], [5])], num_seqs=3, slots=ints([0, 1, 2]), num_scheduled_tokens=ints([1, 1, 2])
    )
    assert assert_told_alike(one_by_one, ahead, [first, joins, decode, decode, mixed]) == 2


@pytest.mark.parametrize(
    "step",
    [
        ExecuteModelInput(freed_slots=ints([1]), num_seqs=2),
        ExecuteModelInput(num_seqs=2, appended_slots=ints([0]), appended_block_ids=ints([9])),
    ],
    ids=["a row of an empty slot", "a row without a block"],
)
def test_a_row_that_contradicts_the_batch_is_a_bad_slot(
    one_by_one: Worker, ahead: Worker, step: ExecuteModelInput
) -> None:
    first = start(request(0, [5, 6, 7], [0]), request(1, [8, 9, 10], [1]))
    decode = ExecuteModelInput(num_seqs=2)
    assert_told_alike(one_by_one, ahead, [first, decode, step, decode])
    assert 1 in [bad.slot for bad in ahead.execute_model(decode).bad_slots]


def test_a_step_that_cannot_be_fails_behind_the_one_in_flight(one_by_one: Worker, ahead: Worker) -> None:
    first, decode = start(request(0, [5, 6, 7], [0, 1])), ExecuteModelInput(num_seqs=1)
    wrong = ExecuteModelInput(num_seqs=1, appended_slots=ints([0]), appended_block_ids=ints([NUM_BLOCKS]))
    expected = run_one_by_one(one_by_one, [first, decode])
    ahead.execute_model(first)
    assert [ahead.begin_step(step) for step in (decode, wrong, decode)] == [True, True, True]
    assert told(ahead.finish_step()) == told(expected[1])
    with pytest.raises(PagodaError, match=f"block {NUM_BLOCKS} is not below"):
        ahead.finish_step()
    with pytest.raises(StaleEpoch, match="an earlier step failed"):
        ahead.finish_step()


def test_a_device_that_fails_takes_the_steps_behind_along(ahead: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ahead._runner
    assert runner is not None
    ahead.execute_model(start(request(0, [5, 6, 7], [0, 1])))
    decode = ExecuteModelInput(num_seqs=1)
    assert ahead.begin_step(decode)
    assert ahead.begin_step(decode)

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner._in_flight._steps[0].download, "wait", broken)
    with pytest.raises(PagodaError, match="illegal memory access"):
        ahead.finish_step()
    with pytest.raises(StaleEpoch, match="illegal memory access"):
        ahead.finish_step()
    ahead.initialize_cache(num_blocks=NUM_BLOCKS, num_cpu_blocks=4)
    assert ahead.execute_model(start(request(0, [5, 6, 7], [0, 1]))).token_ids.size == 1


def test_parameters_that_leave_no_token_are_the_requests_fault(one_by_one: Worker, ahead: Worker) -> None:
    new = [request(0, [5], [0]), request(1, [6], [1], IMPOSSIBLE)]
    steps = [ExecuteModelInput(new_requests=new, num_seqs=2, slots=ints([0, 1])), ExecuteModelInput(num_seqs=2)]
    assert_told_alike(one_by_one, ahead, steps)
    (bad,) = ahead.execute_model(ExecuteModelInput(num_seqs=2)).bad_slots
    assert (bad.slot, bad.code) == (1, Code.INVALID_ARGUMENT)
