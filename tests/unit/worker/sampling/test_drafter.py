"""Drafts: what followed the last tokens before, found exactly, and fewer of them where they fail."""

from typing import Any

import numpy as np
import pytest

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_worker.sampling.drafter import FIRST_PAUSE, MAX_PAUSE, Drafter
from pagoda_worker.sampling.ngram_index import FEW_SLOTS, NgramIndex


def latest_occurrence(log: list[int], min_n: int, max_n: int) -> int:
    """The specification: the longest n-gram goes first, then the latest place."""
    for n in range(min(max_n, len(log)), min_n - 1, -1):
        for end in range(len(log) - 1, n - 1, -1):
            if log[end - n : end] == log[-n:]:
                return end
    return 0


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 4), (2, 4), (3, 3)])
def test_the_index_finds_what_a_search_finds(min_n: int, max_n: int) -> None:
    random = np.random.default_rng(min_n * 10 + max_n)
    index, num_slots = NgramIndex(min_n=min_n, max_n=max_n), 2 * FEW_SLOTS
    tokens, num_tokens = np.zeros((num_slots, 64), dtype=np.int32), np.zeros(num_slots, dtype=np.int64)
    num_found = 0
    for _ in range(150):
        slots = random.permutation(num_slots)[: random.integers(1, num_slots + 1)]
        for slot in slots.tolist():
            if num_tokens[slot] >= 180:  # another sequence enters the slot
                index.forget(slot)
                num_tokens[slot] = 0
            count = int(random.integers(1, 50)) if not num_tokens[slot] else int(random.integers(1, 12))
            if num_tokens[slot] + count >= tokens.shape[1]:
                tokens = np.pad(tokens, ((0, 0), (0, tokens.shape[1])))
            tokens[slot, num_tokens[slot] : num_tokens[slot] + count] = random.integers(0, 5, count)
            num_tokens[slot] += count
        found = index.find(slots, tokens, num_tokens[slots])
        for slot, place in zip(slots.tolist(), found.tolist(), strict=True):
            assert place == latest_occurrence(tokens[slot, : num_tokens[slot]].tolist(), min_n, max_n)
            num_found += place > 0
    assert num_found > 100


def test_a_log_may_be_longer_than_small_numbers_count() -> None:
    """Its tables are of 32 bits."""
    index, slots = NgramIndex(min_n=2, max_n=3), np.arange(FEW_SLOTS + 1)
    log = np.random.default_rng(1).permutation(40_000)
    log[36_000:] = log[34_000:38_000]
    tokens = np.tile(log.astype(np.int32), (slots.size, 1))
    for num_tokens in (36_002, 36_003, 36_500, 36_501):
        assert index.find(slots, tokens, np.full(slots.size, num_tokens)).tolist() == [num_tokens - 2_000] * slots.size


def make_drafter(**config: int) -> Drafter:
    fields: dict[str, Any] = {"num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2, **config}
    return Drafter(config=SpeculativeConfig(**fields), max_num_seqs=4)


def propose(drafter: Drafter, *logs: list[int], most: int = 9) -> list[list[int]]:
    """Drafts for the logs in slots 0, 1, …"""
    tokens = np.zeros((len(logs), 200), dtype=np.int32)
    for slot, log in enumerate(logs):
        tokens[slot, : len(log)] = log
    num_tokens = np.array([len(log) for log in logs])
    lengths, drafts = drafter.propose(np.arange(len(logs)), tokens, num_tokens, np.full(len(logs), most))
    return [draft[:length].tolist() for length, draft in zip(lengths.tolist(), drafts, strict=True)]


def test_a_draft_is_what_followed_the_last_tokens() -> None:
    assert propose(make_drafter(), [1, 2, 3, 4, 5, 6, 9, 2, 3], [1, 2, 3]) == [[4, 5, 6, 9], []]


def test_a_longer_match_goes_before_a_later_one() -> None:
    assert propose(make_drafter(), [7, 2, 3, 40, 9, 2, 3, 50, 7, 2, 3]) == [[40, 9, 2, 3]]


def test_of_equal_matches_the_latest_counts() -> None:
    assert propose(make_drafter(), [2, 3, 40, 2, 3, 50, 8, 2, 3]) == [[50, 8, 2, 3]]


def test_a_loop_goes_round() -> None:
    assert propose(make_drafter(), [5, 6, 5, 6, 5, 6], [8, 8, 8, 8]) == [[5, 6, 5, 6], [8, 8, 8, 8]]


def test_the_step_bounds_a_draft() -> None:
    assert propose(make_drafter(), [5, 6, 5, 6, 5, 6], most=1) == [[5]]
    assert propose(make_drafter(), [5, 6, 5, 6, 5, 6], most=0) == [[]]


def test_drafts_that_fail_become_fewer_then_rare_and_one_that_is_right_ends_that() -> None:
    drafter, log = make_drafter(), [5, 6] * 10
    one = np.zeros(1, dtype=np.int64)
    for expected in (4, 2, 1):
        assert propose(drafter, log) == [[5, 6, 5, 6][:expected]]
        log += [5, 6]
        drafter.judge(one, one + expected, one, one + len(log))
    assert propose(drafter, log) == [[]], "a pause"
    log += [5, 6] * (FIRST_PAUSE // 2)
    assert propose(drafter, log) == [[5]]
    log += [5, 6]
    drafter.judge(one, one + 1, one, one + len(log))
    log += [5, 6] * (FIRST_PAUSE // 2)
    assert propose(drafter, log) == [[]], "twice as long"
    log += [5, 6] * (FIRST_PAUSE // 2)
    for expected in (1, 2, 4):
        assert propose(drafter, log) == [[5, 6, 5, 6][:expected]]
        log += [5, 6] * expected
        drafter.judge(one, one + expected, one + expected, one + len(log))


def test_a_new_sequence_begins_without_a_past() -> None:
    drafter = make_drafter()
    one = np.zeros(1, dtype=np.int64)
    assert propose(drafter, [5, 6, 5, 6, 5, 6]) == [[5, 6, 5, 6]]
    drafter.judge(one, one + 4, one, one + 7)
    drafter.forget(0)
    assert propose(drafter, [5, 6, 7, 8]) == [[]]
    assert propose(drafter, [5, 6, 7, 8, 5, 6]) == [[7, 8, 5, 6]]


def test_pauses_double_up_to_a_bound_and_begin_anew_after_a_right_guess() -> None:
    drafter, tokens = make_drafter(num_speculative_tokens=1), np.tile([5, 6], 2000)[None].astype(np.int32)
    one, now = np.zeros(1, dtype=np.int64), 20

    def pause(num_accepted: int) -> int:
        """Tokens until the next guess after one that was judged."""
        nonlocal now
        drafter.judge(one, one + 1, one + num_accepted, one + now)
        start = now
        while not drafter.propose(one, tokens, one + now, one + 4)[0].any():
            now += 1
        return now - start

    pauses = [pause(0) for _ in range(7)]
    assert pauses == [min(FIRST_PAUSE * 2**number, MAX_PAUSE) for number in range(7)]
    assert pauses[-2:] == [MAX_PAUSE, MAX_PAUSE]
    assert (pause(1), pause(0), pause(0)) == (0, FIRST_PAUSE, 2 * FIRST_PAUSE)


def test_a_new_sequence_waits_for_no_pause_of_the_one_before() -> None:
    drafter, log = make_drafter(num_speculative_tokens=1), [5, 6] * 10
    one = np.zeros(1, dtype=np.int64)
    for _ in range(3):
        drafter.judge(one, one + 1, one, one + len(log))
    assert propose(drafter, log) == [[]]
    drafter.forget(0)
    assert propose(drafter, log) == [[5]]
    drafter.judge(one, one + 1, one, one + len(log))
    assert propose(drafter, log + [5, 6] * (FIRST_PAUSE // 2)) == [[5]], "its first pause is the shortest"
