"""Every parameter in its column, rule by rule, and the columns of log probabilities."""

from typing import Any

import numpy as np
import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_worker.sampling.logits_rules import LogitsRules
from pagoda_worker.sampling.logits_state import LogitsBatch, TokenCounts
from pagoda_worker.sampling.logprobs import launch_logprobs, logprob_columns
from pagoda_worker.sampling.sampling_columns import ANY_TOKEN, NO_LOGPROBS, PLAIN_NAMES, SamplingColumns
from pagoda_worker.sampling.slot_rows import SlotRows
from pagoda_worker.sampling.structured import TokenMask

VOCAB_SIZE = 20
CPU = torch.device("cpu")
INF = float("inf")


def columns_of(*each: dict[str, Any], eos: tuple[int, ...] = (7,)) -> SamplingColumns:
    """A sequence a slot, from slot 1 on."""
    columns = SamplingColumns(max_num_seqs=6, vocab_size=VOCAB_SIZE)
    for slot, params in enumerate(each, start=1):
        columns.set(slot, SamplingParams(**{"temperature": 0, "max_tokens": None, **params}), eos)
    return columns


def test_an_empty_slot_is_greedy_and_asks_for_nothing() -> None:
    columns = columns_of()
    assert (columns.temperature == 0).all()
    assert (columns.repetition_penalty == 1).all()
    assert (columns["top_p"] == 1).all()
    assert columns.is_greedy.all()
    for flag in (columns.has_penalties, columns.has_biases, columns.has_rules, columns.needs_log):
        assert not flag.any()
    assert (columns.logprobs == NO_LOGPROBS).all()
    assert (columns.prompt_logprobs == NO_LOGPROBS).all()
    assert not columns.generations.any()


def test_every_plain_parameter_has_its_own_column() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 9,
        "min_p": 0.25,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "min_tokens": 3,
    }
    assert set(PLAIN_NAMES) == set(given)
    columns = columns_of({}, given, {})
    for name, value in given.items():
        assert columns[name][2] == value
        assert columns[name][1] == columns[name][3]
    assert columns[name][1] != value
    assert columns.seed[2] == 0
    assert columns_of({"seed": 2**64 - 1}).seed[1] == np.uint64(2**64 - 1)


@pytest.mark.parametrize(
    ("params", "has_penalties", "has_biases", "has_rules"),
    [
        ({}, False, False, False),
        ({"presence_penalty": 0.1}, True, False, True),
        ({"frequency_penalty": -0.1}, True, False, True),
        ({"repetition_penalty": 1.1}, True, False, True),
        ({"logit_bias": {3: 1.0}}, False, True, True),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, False, False, False),
        ({"allowed_token_ids": (3,)}, False, True, True),
        ({"bad_words_token_ids": ((3,),)}, False, False, True),
        ({"bad_words_token_ids": ((VOCAB_SIZE,),)}, False, False, False),
        ({"min_tokens": 1}, False, False, True),
        ({"temperature": 0.5, "seed": 3}, False, False, False),
    ],
)
def test_what_changes_logits_is_flagged(
    params: dict[str, Any], has_penalties: bool, has_biases: bool, has_rules: bool
) -> None:
    columns = columns_of({}, params)
    flags = (columns.has_penalties[2], columns.has_biases[2], columns.has_rules[2])
    assert flags == (has_penalties, has_biases, has_rules)
    assert columns.is_greedy[2] == (not has_rules and "temperature" not in params)
    assert columns.is_greedy[1]
    columns.clear(2)
    assert (columns.has_penalties[2], columns.has_biases[2], columns.has_rules[2]) == (False, False, False)
    assert (columns.num_bad_words[2], columns.min_tokens[2], columns.temperature[2]) == (0, 0, 0)


def test_end_tokens_matter_with_min_tokens_alone() -> None:
    columns = columns_of({"stop_token_ids": (3, 7)}, {"stop_token_ids": (9, 3, 7, 30), "min_tokens": 2})
    assert columns.end_token_ids.lengths_of(np.array([1, 2])).tolist() == [0, 3]
    assert columns.end_token_ids.values[2, :3].tolist() == [3, 7, 9]


@pytest.mark.parametrize(
    ("params", "needs_log"),
    [
        ({"bad_words_token_ids": ((3,), (4,))}, False),
        ({"bad_words_token_ids": ((3,), (4, 5))}, True),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, True),
        ({"repetition_penalty": 2.0}, False),
    ],
)
def test_what_needs_the_tokens_themselves_is_flagged(params: dict[str, Any], needs_log: bool) -> None:
    assert columns_of(params).needs_log[1] == needs_log


def test_log_probabilities_are_as_many_as_were_asked_for() -> None:
    columns = columns_of({"logprobs": 0}, {"logprobs": -1, "prompt_logprobs": 4}, {"logprob_token_ids": (3, 5, 30)})
    assert columns.logprobs[1:3].tolist() == [0, -1]
    assert columns.prompt_logprobs[1:3].tolist() == [NO_LOGPROBS, 4]
    assert not columns.is_greedy[1]
    slots = np.array([1, 3])
    chosen = columns.logprob_token_ids_of(slots)
    assert chosen is not None
    ids, lengths = chosen
    assert (ids.tolist(), lengths.tolist()) == ([[0, 0], [3, 5]], [0, 2])
    assert columns.logprob_token_ids_of(np.array([1, 2])) is None
    columns.clear(2)
    assert (columns.logprobs[2], columns.prompt_logprobs[2]) == (NO_LOGPROBS, NO_LOGPROBS)


def test_each_sequence_is_another_generation() -> None:
    columns = columns_of({}, {})
    assert columns.generations.tolist() == [0, 1, 1, 0, 0, 0]
    columns.clear(1)
    columns.set(1, SamplingParams(), ())
    assert columns.generations.tolist() == [0, 3, 1, 0, 0, 0]


def test_bad_words_are_padded_on_the_left() -> None:
    columns = columns_of(
        {"bad_words_token_ids": ((4,), (5, 6))}, {"bad_words_token_ids": ((1, 2, 3),)}, {"bad_words_token_ids": ((9,),)}
    )
    any_token = ANY_TOKEN
    assert columns.num_bad_words[1:4].tolist() == [2, 1, 1]
    assert columns.bad_words[1, :2].tolist() == [[any_token, any_token, 4], [any_token, 5, 6]]
    assert columns.bad_words[2, 0].tolist() == [1, 2, 3]
    assert columns.bad_words[3, 0].tolist() == [any_token, any_token, 9]


# Rules.


def ruled(columns: SamplingColumns, logs: list[tuple[list[int], list[int]]], slots: list[int]) -> torch.Tensor:
    """Logits 0, 1, … after the rules; `logs`: prompt and output of each slot from 1 on."""
    tokens = np.zeros((6, 16), dtype=np.int32)
    counts = np.zeros((6, 2), dtype=np.int64)
    for slot, (prompt, output) in enumerate(logs, start=1):
        tokens[slot, : len(prompt) + len(output)] = [*prompt, *output]
        counts[slot] = len(prompt), len(prompt) + len(output)
    rows = np.array(slots)
    batch = LogitsBatch(slots=rows, tokens=tokens, num_prompt_tokens=counts[rows, 0], num_tokens=counts[rows, 1])
    logits = torch.arange(float(VOCAB_SIZE)).repeat(len(slots), 1)
    rules = LogitsRules(columns=columns, vocab_size=VOCAB_SIZE, device=CPU)
    result = rules.apply(logits, batch)
    assert torch.equal(logits, torch.arange(float(VOCAB_SIZE)).repeat(len(slots), 1))
    return result


def changed(row: torch.Tensor) -> dict[int, float]:
    """The logits of a row that are others."""
    return {token: value for token, value in enumerate(row.tolist()) if value != token}


def test_biases_are_added_and_what_is_not_allowed_is_masked() -> None:
    columns = columns_of(
        {"logit_bias": {3: 1.5, 4: -2.0}},
        {"allowed_token_ids": (3, 5)},
        {"allowed_token_ids": (3, 5), "logit_bias": {5: 2.0, 6: 9.0}},
        {},
    )
    first, second, third, fourth = ruled(columns, [([1], [])] * 4, [1, 2, 3, 4])
    assert changed(first) == {3: 4.5, 4: 2.0}
    assert changed(second) == {token: -INF for token in range(VOCAB_SIZE) if token not in (3, 5)}
    assert changed(third) == {5: 7.0} | {token: -INF for token in range(VOCAB_SIZE) if token not in (3, 5)}
    assert changed(fourth) == {}


@pytest.mark.parametrize(("num_output", "is_masked"), [(0, True), (1, True), (2, False)])
def test_ends_are_masked_until_min_tokens_are_there(num_output: int, is_masked: bool) -> None:
    columns = columns_of({"min_tokens": 2, "stop_token_ids": (9,)}, {"min_tokens": 2})
    first, second = ruled(columns, [([1, 2, 3], [4] * num_output)] * 2, [1, 2])
    assert changed(first) == ({7: -INF, 9: -INF} if is_masked else {})
    assert changed(second) == ({7: -INF} if is_masked else {})


@pytest.mark.parametrize(
    ("output", "masked"),
    [([], {4}), ([5], {4, 6}), ([1, 5], {4, 6}), ([5, 1], {4}), ([1, 2], {4, 3}), ([2], {4}), ([1, 2, 5], {4, 6})],
)
def test_the_last_token_of_a_bad_word_is_masked_where_its_others_end_the_output(
    output: list[int], masked: set[int]
) -> None:
    columns = columns_of({"bad_words_token_ids": ((4,), (5, 6), (1, 2, 3))}, {})
    first, second = ruled(columns, [([5, 1], output), ([5], output)], [1, 2])
    assert changed(first) == dict.fromkeys(masked, -INF)
    assert changed(second) == {}


def test_penalties_are_of_the_output_and_repetition_of_the_prompt_too() -> None:
    columns = columns_of(
        {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 2.0}, {"presence_penalty": -1.0}
    )
    rows = ruled(columns, [([3, 4], [5, 6, 6])] * 4, [4, 3, 2, 1])
    assert [changed(row) for row in rows] == [
        {5: 6.0, 6: 7.0},
        {3: 1.5, 4: 2.0, 5: 2.5, 6: 3.0},
        {5: 4.0, 6: 4.0},
        {5: 4.0, 6: 5.0},
    ]


def test_counts_follow_one_token_and_are_made_anew_after_more() -> None:
    generations = np.ones(3, dtype=np.int64)
    counts = TokenCounts(generations=generations, vocab_size=6, device=CPU)
    tokens = np.zeros((3, 8), dtype=np.int32)
    tokens[1] = [0, 1, 2, 2, 3, 3, 4, 4]

    def of(num_tokens: int, last: torch.Tensor | None = None) -> tuple[list[bool], list[float]]:
        batch = LogitsBatch(
            slots=np.array([1]),
            tokens=tokens,
            num_prompt_tokens=np.array([2]),
            num_tokens=np.array([num_tokens]),
            last_tokens=last,
        )
        in_prompt, used = counts.of(batch)
        return in_prompt[0].tolist(), used[0].tolist()

    prompt = [True, True, False, False, False, False]
    assert of(2) == (prompt, [0, 0, 0, 0, 0, 0])
    assert of(3) == (prompt, [0, 0, 1, 0, 0, 0])
    assert of(3) == (prompt, [0, 0, 1, 0, 0, 0])
    assert of(6) == (prompt, [0, 0, 2, 2, 0, 0])
    assert of(7, torch.tensor([9, 5, 9])) == (prompt, [0, 0, 2, 2, 0, 1]), "the log has only a placeholder"
    assert of(4) == (prompt, [0, 0, 2, 0, 0, 0]), "another log"
    generations[1] += 1
    assert of(5) == (prompt, [0, 0, 2, 1, 0, 0])


def test_rows_are_taken_when_they_are_needed_and_again_after_their_sequence() -> None:
    generations = np.ones(8, dtype=np.int64)
    rows = SlotRows(generations)
    assert rows.size == 0
    place, is_new = rows.take(np.array([5, 2]))
    assert (sorted(place.tolist()), is_new.tolist(), rows.size) == ([0, 1], [True, True], 2)
    again, is_new = rows.take(np.array([2, 5]))
    assert (again.tolist(), is_new.tolist()) == (place[::-1].tolist(), [False, False])
    generations[5] += 1
    other, is_new = rows.take(np.array([2, 7]))
    assert (other.tolist(), is_new.tolist(), rows.size) == ([place[1], place[0]], [False, True], 2)
    later, is_new = rows.take(np.array([5]))
    assert (is_new.tolist(), later[0] not in other, rows.size) == ([True], True, 4)


# Log probabilities.


def described(columns: Any) -> list[tuple[int, int, list[int], int]]:
    """(row, count, token ids, rank) of each row."""
    found, start = [], 0
    for row, count, rank in zip(
        columns.rows.tolist(), columns.counts.tolist(), columns.sampled_ranks.tolist(), strict=True
    ):
        found.append((row, count, columns.token_ids[start : start + count].tolist(), rank))
        start += count
    assert start == columns.token_ids.size == columns.logprobs.size
    return found


LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 4.0, 2.0], [0.0, 1.0, 2.0, 3.0], [9.0, 8.0, 7.0, 6.0]])
TOKENS = np.array([2, 0, 0, 3])


@pytest.mark.parametrize("is_normalised", [True, False])
def test_rows_get_their_own_token_and_as_many_top_ones_as_they_ask_for(is_normalised: bool) -> None:
    num_top = np.array([1, NO_LOGPROBS, -1, 0])
    columns = logprob_columns(LOGITS, TOKENS, num_top, is_normalised=is_normalised)
    assert columns is not None
    assert described(columns) == [(0, 2, [2, 1], 3), (2, 5, [0, 3, 2, 1, 0], 4), (3, 1, [3], 4)]
    values = LOGITS.log_softmax(-1) if is_normalised else LOGITS
    expected = [values[0, 2], values[0, 1], *values[2, [0, 3, 2, 1, 0]], values[3, 3]]
    np.testing.assert_allclose(columns.logprobs, np.array(expected), rtol=1e-5)
    assert logprob_columns(LOGITS, TOKENS, np.full(4, NO_LOGPROBS)) is None
    assert launch_logprobs(LOGITS, torch.from_numpy(TOKENS), np.full(4, NO_LOGPROBS)) is None
    more = logprob_columns(LOGITS, TOKENS, np.full(4, 9), is_normalised=is_normalised)
    assert more is not None
    assert more.counts.tolist() == [5] * 4, "there are no more than the vocabulary has"


def test_chosen_tokens_come_in_the_place_of_the_top_ones() -> None:
    chosen = np.array([[0, 0, 0], [3, 1, 0], [0, 0, 0], [2, 0, 1]]), np.array([0, 2, 0, 3])
    columns = logprob_columns(LOGITS, TOKENS, np.array([1, 1, NO_LOGPROBS, 1]), chosen=chosen, is_normalised=False)
    assert columns is not None
    assert described(columns) == [(0, 2, [2, 1], 3), (1, 3, [0, 3, 1], 1), (3, 4, [3, 2, 0, 1], 4)]
    assert columns.logprobs.tolist() == [1, 3, 5, 2, 1, 6, 7, 9, 8]
    none = logprob_columns(LOGITS, TOKENS, np.array([1, NO_LOGPROBS, 1, NO_LOGPROBS]), chosen=chosen)
    assert none is not None
    assert described(none) == [(0, 2, [2, 1], 3), (2, 2, [0, 3], 4)]


def test_rows_that_are_not_kept_are_left_out_and_not_counted() -> None:
    num_top = np.array([1, NO_LOGPROBS, 2, 0])
    launched = launch_logprobs(LOGITS, torch.from_numpy(TOKENS), num_top)
    assert launched is not None
    for kept, expected in (
        ([True] * 4, [(0, 2, [2, 1], 3), (2, 3, [0, 3, 2], 4), (3, 1, [3], 4)]),
        ([False, True, True, True], [(1, 3, [0, 3, 2], 4), (2, 1, [3], 4)]),
        ([True, False, True, False], [(0, 2, [2, 1], 3), (1, 3, [0, 3, 2], 4)]),
    ):
        columns = launched.columns(np.array(kept))
        assert columns is not None
        assert described(columns) == expected
    assert launched.columns(np.array([False, True, False, False])) is None


def test_under_a_mask_what_is_forbidden_is_none_and_the_rest_is_not_normalised_anew() -> None:
    mask = TokenMask(rows=np.array([2]), bits=np.array([[0b0101]], dtype=np.uint8), is_beam=np.array([True]))
    columns = logprob_columns(LOGITS, TOKENS, np.array([NO_LOGPROBS, 1, 3, NO_LOGPROBS]), token_mask=mask)
    assert columns is not None
    values = LOGITS.log_softmax(-1)
    expected = [values[1, 0], values[1, 0], values[2, 0], values[2, 2], values[2, 0], -INF]
    np.testing.assert_allclose(columns.logprobs, np.array(expected), rtol=1e-5)
    assert [row[3] for row in described(columns)] == [1, 2]


def test_a_mask_of_beams_is_named_by_their_places() -> None:
    bits = np.array([[1], [2], [4]], dtype=np.uint8)
    mask = TokenMask(rows=np.array([1, 4, 6]), bits=bits, is_beam=np.array([True, False, True]))
    found = mask.of_beams(np.array([0, 4, 6]))
    assert found is not None
    assert (found.rows.tolist(), found.bits.tolist(), found.is_beam.tolist()) == ([2], [[4]], [True])
    both = mask.of_beams(np.array([1, 6]))
    assert both is not None
    assert (both.rows.tolist(), both.bits.tolist()) == ([0, 1], [[1], [4]])
    assert mask.of_beams(np.array([0, 4])) is None


RICH: list[dict[str, Any]] = [
    {"bad_words_token_ids": ((1, 2, 3), (4, 5, 6)), "logprobs": 3, "prompt_logprobs": 2},
    {"logit_bias": {3: 1.0, 4: 2.0}, "allowed_token_ids": (3, 4, 5), "temperature": 0.5, "seed": 9},
    {"min_tokens": 5, "stop_token_ids": (8,), "logprob_token_ids": (3, 5), "repetition_penalty": 2.0, "top_k": 4},
    {"structured_outputs": StructuredOutputsParams(regex="a"), "presence_penalty": 1.0, "top_p": 0.5, "min_p": 0.5},
]


@pytest.mark.parametrize("before", RICH)
@pytest.mark.parametrize("after", [{}, {"bad_words_token_ids": ((9,),)}, {"logit_bias": {7: 1.0}, "min_tokens": 1}])
def test_a_slot_keeps_nothing_of_the_sequence_before(before: dict[str, Any], after: dict[str, Any]) -> None:
    columns, fresh = columns_of(before), columns_of(after)
    columns.set(1, SamplingParams(**{"temperature": 0, "max_tokens": None, **after}), (7,))
    flags = ("has_penalties", "has_biases", "has_rules", "is_greedy", "needs_log")
    for name in (*PLAIN_NAMES, *flags, "seed", "logprobs", "prompt_logprobs", "num_bad_words"):
        assert getattr(columns, name)[1] == getattr(fresh, name)[1], name
    slots = np.array([1])
    for name in ("end_token_ids", "bias_token_ids", "biases", "allowed_token_ids", "logprob_token_ids"):
        (count,) = getattr(columns, name).lengths_of(slots)
        assert count == getattr(fresh, name).lengths_of(slots)[0], name
        if count:
            assert getattr(columns, name).values[1, :count].tolist() == getattr(fresh, name).values[1, :count].tolist()
            assert not getattr(columns, name).values[1, count:].any(), "what pads biases adds nothing"
    if columns.num_bad_words[1]:
        (words,) = columns.bad_words[1, :1].tolist()
        assert [token for token in words if token != ANY_TOKEN] == [9]
