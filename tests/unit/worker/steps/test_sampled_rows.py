"""Which guesses were right: a guess counts up to the first wrong one, and one whose logits are bad is none."""

import numpy as np

from pagoda_worker.sampling.logits_state import LogitsBatch
from pagoda_worker.steps.sampled_rows import SampledRows


def rows_of(log: list[int], num_tokens: int, num_draft: int) -> SampledRows:
    """One sequence that knows `num_tokens` of its log, with guesses after them."""
    count = 1 + num_draft
    ahead = np.arange(count)
    return SampledRows(
        sequences=np.array([0]),
        slots=np.array([0]),
        num_draft_tokens=np.array([num_draft]),
        starts=np.array([0]),
        owners=np.zeros(count, dtype=np.int64),
        ahead=ahead,
        logit_rows=ahead,
        batch=LogitsBatch(
            slots=np.zeros(count, dtype=np.int64),
            tokens=np.array([log], dtype=np.int32),
            num_prompt_tokens=np.ones(count, dtype=np.int64),
            num_tokens=num_tokens + ahead,
        ),
    )


def num_new(sampled: list[int], *, bad: tuple[int, ...] = (), log: tuple[int, ...] = (5, 6, 7, 8)) -> int:
    """New tokens of a sequence that knows 2 and guesses 2."""
    is_bad = np.isin(np.arange(len(sampled)), bad)
    return int(rows_of(list(log), 2, len(sampled) - 1).num_new(np.array(sampled), is_bad)[0])


def test_right_guesses_and_the_token_after_them_are_new() -> None:
    assert [num_new(sampled) for sampled in ([7, 8, 9], [7, 1, 9], [1, 8, 9])] == [3, 2, 1]


def test_a_bad_row_ends_what_is_new_even_where_its_token_is_the_guess() -> None:
    assert num_new([7, 8, 9], bad=(2,)) == 2
    assert num_new([7, 8, 9], bad=(1,)) == 1
    assert num_new([7, 8, 9], bad=(0,)) == 0
    assert num_new([7, 8, 9], bad=(0, 1, 2)) == 0


def test_a_log_that_is_full_has_no_guess_after_its_end() -> None:
    assert num_new([7, 8, 9], log=(5, 6, 7, 8)) == 3, "the third place is none of the log's"
