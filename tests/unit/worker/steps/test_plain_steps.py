"""When a step may take a short way: one call for all layers, the likeliest tokens as they are, a launch ahead."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import Code
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.decoder.decode_rows import SequenceColumns
from pagoda_worker.sampling.drafter import Drafter
from pagoda_worker.steps.forward_pass import Computed
from pagoda_worker.steps.input_batch import InputBatch
from pagoda_worker.steps.step import BadSlot, IntArray, NewRequest, StepInput, StepOutput
from pagoda_worker.steps.step_sampler import StepSampler
from pagoda_worker.steps.steps_in_flight import StepsInFlight

MAX_MODEL_LEN = 20


class Layers:
    """Decodes a step in one call, unless told not to."""

    def __init__(self, token_ids: IntArray | None = None) -> None:
        self.token_ids = np.array([7, 8]) if token_ids is None else token_ids
        self.is_able = True
        self.slots: list[list[int]] = []

    def decode(self, slots: IntArray, columns: SequenceColumns, *, max_tokens: int, more_tables: Any) -> Any:
        assert (max_tokens, more_tables.shape[0]) == (MAX_MODEL_LEN + 1, 0)
        self.slots.append(slots.tolist())
        return self.token_ids if self.is_able else None


def batch_with(*slots: int, drafter: Drafter | None = None, pooled: tuple[int, ...] = ()) -> InputBatch:
    batch = InputBatch(
        max_num_seqs=4, max_model_len=MAX_MODEL_LEN, block_size=4, num_blocks=50, vocab_size=90, drafter=drafter
    )
    new = [
        NewRequest(
            slot=slot,
            request_id=f"r{slot}",
            prompt_token_ids=np.array([5, 6]),
            sampling_params=SamplingParams(temperature=0),
            block_ids=np.array([slot]),
            num_computed_tokens=1,
            pooling=PoolingParams() if slot in pooled else None,
        )
        for slot in slots
    ]
    batch.apply(StepInput(new_requests=new))
    return batch


def decode(batch: InputBatch, layers: Layers, **step: Any) -> Any:
    given: dict[str, Any] = {"num_seqs": 2, "slots": np.array([0, 2]), **step}
    return batch.decode(StepInput(**given), cast("Any", layers))


def test_a_plain_step_is_decoded_in_one_call_and_is_the_batch_of_the_next_one() -> None:
    batch, layers = batch_with(0, 2), Layers()
    assert decode(batch, layers).tolist() == [7, 8]
    assert decode(batch, layers, slots=None).tolist() == [7, 8]
    assert layers.slots == [[0, 2], [0, 2]]
    layers.is_able = False
    assert decode(batch, layers, slots=np.array([2, 0])) is None
    layers.is_able = True
    decode(batch, layers, slots=None)
    assert layers.slots[2:] == [[2, 0], [0, 2]], "what was not decoded is no batch yet"


@pytest.mark.parametrize(
    "step",
    [
        {"num_scheduled_tokens": np.array([1, 1])},
        {"num_seqs": 3},
        {"num_seqs": 1},
        {"num_seqs": 0, "slots": np.zeros(0, dtype=np.int64)},
    ],
    ids=["counts", "more", "fewer", "none"],
)
def test_a_step_of_another_form_is_not_decoded_in_one_call(step: dict[str, Any]) -> None:
    layers = Layers()
    assert decode(batch_with(0, 2), layers, **step) is None
    assert layers.slots == []


def test_what_drafts_failed_is_pooled_or_has_an_adapter_is_not_decoded_in_one_call() -> None:
    config = SpeculativeConfig(num_speculative_tokens=2)
    drafting = batch_with(0, 2, drafter=Drafter(config=config, max_num_seqs=4))
    failed, adapted, elsewhere = batch_with(0, 2), batch_with(0, 2), batch_with(0, 2)
    failed.fail(3, Code.INTERNAL, "it is bad")
    adapted.adapters[2] = elsewhere.adapters[1] = cast("Any", object())
    layers = Layers()
    for batch in (drafting, failed, batch_with(0, 2, 3, pooled=(3,)), adapted):
        assert decode(batch, layers) is None
    assert layers.slots == []
    assert decode(elsewhere, layers) is not None, "an adapter of a sequence that waits"


def test_adapters_are_told_by_row_and_leave_with_their_sequence() -> None:
    batch = batch_with(0, 1, 2)
    adapter: Any = object()
    batch.adapters[1] = adapter
    assert batch.adapters_of(np.array([2, 1, 0])) == [None, adapter, None]
    assert batch.adapters_of(np.array([0, 2])) == []
    batch.apply(StepInput(freed_slots=np.array([1])))
    assert batch.adapters_of(np.array([2, 1, 0])) == []


@pytest.mark.parametrize("counts", [None, np.array([1])])
def test_a_sequence_that_fills_its_context_computes_nothing_more(counts: IntArray | None) -> None:
    batch = batch_with(1)
    prompt = np.full(MAX_MODEL_LEN, 5)
    new = NewRequest(
        slot=0,
        request_id="long",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=0),
        block_ids=np.arange(10, 16),
        num_computed_tokens=MAX_MODEL_LEN - 1,
    )
    step = StepInput(new_requests=[new], num_seqs=1, slots=np.array([0]), num_scheduled_tokens=counts)
    batch.apply(step)
    inputs = batch.prepare(step)
    assert not inputs.bad_slots
    batch.advance(inputs)
    batch.append_tokens(np.array([0]), np.array([6]), np.array([0]))
    assert batch.tokens[0, MAX_MODEL_LEN] == 6, "the last token is logged, and never computed"
    again = batch.prepare(StepInput(num_seqs=1, num_scheduled_tokens=counts))
    assert (again.slots.tolist(), [bad.slot for bad in again.bad_slots]) == ([], [0])


def test_rows_beside_one_that_failed_have_their_own_drafts() -> None:
    config = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)
    batch = batch_with(0, drafter=Drafter(config=config, max_num_seqs=4))
    new = [
        NewRequest(
            slot=slot,
            request_id=f"r{slot}",
            prompt_token_ids=np.array([1, 2, 3, 1, 2]),
            sampling_params=SamplingParams(temperature=0),
            block_ids=np.array([10 * slot, 10 * slot + 1])[: 2 if slot == 1 else 3],
            num_computed_tokens=4,
        )
        for slot in (1, 2, 3)
    ]
    step = StepInput(
        new_requests=new,
        num_seqs=4,
        slots=np.array([0, 1, 2, 3]),
        num_scheduled_tokens=np.ones(4, dtype=np.int64),
        num_lookahead_tokens=np.array([3, 0, 2, 1]),
    )
    batch.apply(step)
    batch.fail(0, Code.INTERNAL, "it is bad")
    inputs = batch.prepare(step)
    assert (inputs.batch_rows.tolist(), [bad.slot for bad in inputs.bad_slots]) == ([1, 2, 3], [0])
    assert inputs.num_draft_tokens.tolist() == [0, 2, 1]
    assert inputs.input_ids.tolist() == [2, 2, 3, 1, 2, 3]


def test_a_slot_that_does_not_exist_harms_no_other() -> None:
    batch = batch_with(0, 2)
    new = NewRequest(
        slot=4,
        request_id="r4",
        prompt_token_ids=np.array([5]),
        sampling_params=SamplingParams(temperature=0),
        block_ids=np.array([9]),
    )
    rejected = BadSlot(slot=4, code=Code.INVALID_ARGUMENT, message="unreadable")
    batch.apply(StepInput(freed_slots=np.array([4]), rejected=[rejected], new_requests=[new]))
    assert not batch.prepare(StepInput(num_seqs=2, slots=np.array([0, 2]))).bad_slots
    assert batch.num_blocks_used == 3


class Batch:
    """Notes how tokens are logged."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def append_plain(self, inputs: Any, token_ids: IntArray) -> None:
        self.calls.append(f"append {token_ids.tolist()}")

    def advance(self, inputs: Any) -> None:
        self.calls.append("advance")


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({}, True),
        ({"is_greedy": False}, False),
        ({"processors": False}, False),
        ({"token_mask": Future()}, False),
        ({"highest": float("nan")}, False),
        ({"highest": float("inf")}, False),
        ({"highest": None}, False),
    ],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_the_likeliest_tokens_are_taken_where_nothing_else_decides(change: dict[str, Any], is_taken: bool) -> None:
    given = {"is_greedy": True, "processors": True, "token_mask": None, "highest": 1.0, **change}
    batch, sampler = Batch(), object.__new__(StepSampler)
    sampled = StepOutput(token_ids=np.array([90, 91]))
    sampler.__dict__.update(
        _batch=batch,
        _processors=SimpleNamespace(is_empty=given["processors"]),
        _parallel=SimpleNamespace(is_leader=True),
        _sample=lambda *args: sampled,
    )
    highest = given["highest"]
    likeliest = None if highest is None else (torch.tensor([0.5, highest]), torch.tensor([5, 6]))
    inputs: Any = SimpleNamespace(is_greedy=given["is_greedy"])
    rows: Any = None
    computed = Computed(logits=torch.zeros(2, 9), likeliest=likeliest)
    output = sampler.sample(StepInput(num_seqs=2), inputs, rows, computed, given["token_mask"])
    assert output.token_ids.tolist() == ([5, 6] if is_taken else [90, 91])
    assert batch.calls == (["append [5, 6]"] if is_taken else ["advance"])


PAIR = np.array([[0, 1]])


@pytest.mark.parametrize(
    ("change", "may_follow"),
    [
        ({}, True),
        ({"num_seqs": 0}, False),
        ({"rejected": [BadSlot(slot=1, code=Code.INVALID_ARGUMENT, message="unreadable")]}, False),
        ({"num_lookahead_tokens": np.array([1])}, False),
        *(({f"{kind}_to_swap_{way}": PAIR}, False) for kind in ("blocks", "states") for way in ("in", "out")),
        *(({name: PAIR}, True) for name in ("blocks_to_copy", "states_to_load", "states_to_save")),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_a_step_follows_one_in_flight_unless_it_moves_something_to_or_from_the_host(
    change: dict[str, Any], may_follow: bool
) -> None:
    steps = object.__new__(StepsInFlight)
    steps.__dict__["_latest"] = None
    assert bool(steps.can_follow(StepInput(**{"num_seqs": 1, **change}))) is may_follow


def launches(batch: InputBatch, step: StepInput, *, gives_processed: bool = False) -> bool:
    steps = object.__new__(StepsInFlight)
    steps.__dict__.update(_batch=batch, _gives_processed=gives_processed)
    return bool(steps.can_launch(batch.prepare(step)))


@pytest.mark.parametrize("counts", [None, np.array([1])], ids=["plain", "counted"])
@pytest.mark.parametrize(
    ("params", "gives_processed", "may_launch"),
    [
        ({}, False, True),
        ({}, True, True),
        ({"logprobs": 1}, False, True),
        ({"logprobs": 1}, True, False),
        ({"bad_words_token_ids": ((3, 4),)}, False, False),
    ],
)
def test_a_step_is_launched_where_the_host_has_no_work_afterwards(
    params: dict[str, Any], gives_processed: bool, may_launch: bool, counts: IntArray | None
) -> None:
    batch = batch_with(0)
    batch.sampling.set(0, SamplingParams(**{"temperature": 0, **params}), ())
    step = StepInput(num_seqs=1, slots=np.array([0]), num_scheduled_tokens=counts)
    assert launches(batch, step, gives_processed=gives_processed) is may_launch


def test_a_worker_that_drafts_launches_nothing_ahead() -> None:
    config = SpeculativeConfig(num_speculative_tokens=2)
    batch = batch_with(0, drafter=Drafter(config=config, max_num_seqs=4))
    assert not launches(batch, StepInput(num_seqs=1, slots=np.array([0])))


def test_a_step_whose_slots_are_all_bad_is_not_launched() -> None:
    assert not launches(batch_with(0), StepInput(num_seqs=1, slots=np.array([3])))
