"""StatePool: rows of slots, of snapshots and of draft tokens are each other's only where they are copied."""

import numpy as np
import pytest
import torch

from pagoda_worker.memory.state_pool import StatePool, state_bytes
from pagoda_worker.models.model import RecurrentLayer, StateTensor
from pagoda_worker.steps.step import IntArray

LAYERS = [
    RecurrentLayer((StateTensor((2, 3)), StateTensor((4,), torch.float32))),
    RecurrentLayer((StateTensor((5,)),)),
]
NUM_SLOTS, NUM_SNAPSHOTS, NUM_HOST, NUM_DRAFT = 4, 3, 2, 2


def ints(*values: object) -> IntArray:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def pool() -> StatePool:
    """Each row of each tensor holds its own number."""
    pool = StatePool(
        layers=LAYERS,
        num_slots=NUM_SLOTS,
        num_snapshots=NUM_SNAPSHOTS,
        num_cpu_snapshots=NUM_HOST,
        num_draft_tokens=NUM_DRAFT,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    for layer in pool.tensors:
        for tensor in layer:
            for row in range(tensor.shape[0]):
                tensor[row] = row + 1
    return pool


def rows(pool: StatePool) -> list[int]:
    """What each row holds, the same in all tensors."""
    found = [[int(row.flatten()[0]) for row in tensor] for layer in pool.tensors for tensor in layer]
    for layer in pool.tensors:
        for tensor in layer:
            assert all(bool((row == row.flatten()[0]).all()) for row in tensor), "a row is copied as a whole"
    assert all(one == found[0] for one in found)
    return found[0]


UNTOUCHED = list(range(1, NUM_SLOTS * (1 + NUM_DRAFT) + NUM_SNAPSHOTS + 1))


def changed(**places: int) -> list[int]:
    """The untouched rows but for some: `r5=1` holds 1 in row 5."""
    found = list(UNTOUCHED)
    for name, value in places.items():
        found[int(name[1:])] = value
    return found


def test_a_sequence_takes_the_bytes_of_all_its_tensors(pool: StatePool) -> None:
    assert state_bytes(LAYERS, torch.bfloat16) == 2 * 6 + 4 * 4 + 2 * 5
    assert pool.num_bytes == len(UNTOUCHED) * state_bytes(LAYERS, torch.bfloat16)
    assert rows(pool) == UNTOUCHED


def test_a_sequence_without_a_token_begins_at_zero(pool: StatePool) -> None:
    pool.begin(ints())
    pool.begin(ints(2, 0))
    assert rows(pool) == changed(r0=0, r2=0)


def test_states_are_saved_and_loaded_between_slots_and_snapshots(pool: StatePool) -> None:
    pool.save(ints((3, 0), (1, 2)))
    assert rows(pool) == changed(r4=4, r6=2)
    pool.load(ints((0, 2), (0, 0)))
    assert rows(pool) == changed(r4=4, r6=2, r2=4, r0=4)


def test_snapshots_come_back_from_the_host_as_they_went(pool: StatePool) -> None:
    pool.swap_out(ints((2, 1), (0, 0)))
    pool.save(ints((0, 0), (0, 2)))
    pool.swap_in(ints((1, 0), (0, 2)))
    assert rows(pool) == changed(r4=7, r6=5)


def test_each_token_of_a_draft_but_the_last_has_a_row_of_its_slot(pool: StatePool) -> None:
    batch = pool.batch(ints(3, 0, 1), ints(4, 1, 2), ints(2, 0, 1))
    first = NUM_SLOTS + NUM_SNAPSHOTS
    assert batch.kept_rows is not None
    # Known, known and the two rows of slot 3 before each draft token; nothing of slot 0; the first row of slot 1.
    assert batch.kept_rows.tolist() == [-1, first + 6, first + 7, -1, -1, first + 2, -1]
    assert batch.rows.tolist() == [3, 0, 1]
    assert pool.batch(ints(3, 0), ints(1, 5), ints(0, 0)).kept_rows is None


@pytest.mark.parametrize(
    ("num_right", "expected"),
    [((2, 0, 1), {}), ((0, 0, 1), {"r3": 14}), ((1, 0, 0), {"r3": 15, "r1": 10}), ((2, 0, 0), {"r1": 10})],
)
def test_a_state_goes_back_to_that_before_the_first_wrong_token(
    pool: StatePool, num_right: tuple[int, ...], expected: dict[str, int]
) -> None:
    pool.settle(ints(3, 0, 1), ints(2, 0, 1), ints(*num_right))
    assert rows(pool) == changed(**expected), "where all were right, and where none were tried, nothing is undone"


def test_what_there_is_not_is_refused_by_its_name(pool: StatePool) -> None:
    for call, name in (
        (lambda: pool.begin(ints(NUM_SLOTS)), f"slot {NUM_SLOTS} is not below {NUM_SLOTS}"),
        (lambda: pool.load(ints((NUM_SNAPSHOTS, 0))), f"snapshot {NUM_SNAPSHOTS} is not below"),
        (lambda: pool.save(ints((0, NUM_SNAPSHOTS))), f"snapshot {NUM_SNAPSHOTS} is not below"),
        (lambda: pool.swap_out(ints((0, NUM_HOST))), f"host snapshot {NUM_HOST} is not below {NUM_HOST}"),
        (lambda: pool.swap_in(ints((NUM_HOST, 0))), f"host snapshot {NUM_HOST} is not below {NUM_HOST}"),
    ):
        with pytest.raises(ValueError, match=name):
            call()
    assert rows(pool) == UNTOUCHED
