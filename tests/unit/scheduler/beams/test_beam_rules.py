"""The rules of beam search by themselves: against all sequences there are, and where each of the ways to end ends."""

import itertools
import math

import pytest

from pagoda_scheduler.beams.beam_search import BeamSearch, Continuation, EarlyStopping

END = 3
TOKENS = (0, 1, 2, END)


def logprobs_after(prefix: tuple[int, ...]) -> dict[int, float]:
    """Of each token after `prefix`: all different, and not the same after another prefix."""
    weights = {
        token: 1.0 + (7 * sum(prefix) + 3 * len(prefix) + 5 * token * (1 + len(prefix))) % 11 for token in TOKENS
    }
    total = sum(weights.values())
    return {token: math.log(weight / total) for token, weight in weights.items()}


def ranked_after(prefix: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """The same, the likeliest first."""
    ranked = sorted(logprobs_after(prefix).items(), key=lambda pair: -pair[1])
    return [token for token, _ in ranked], [logprob for _, logprob in ranked]


def every_sequence(max_tokens: int) -> list[tuple[int, ...]]:
    """Those that end with END or at their length."""
    found = [(*head, END) for size in range(max_tokens) for head in itertools.product(TOKENS[:3], repeat=size)]
    return [*found, *itertools.product(TOKENS[:3], repeat=max_tokens)]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_search_wide_enough_finds_the_best_of_all(length_penalty: float) -> None:
    search = BeamSearch(
        beam_width=50,
        max_tokens=4,
        end_token_ids=frozenset([END]),
        length_penalty=length_penalty,
        early_stopping="never",
    )
    while search.beams:
        search.advance([ranked_after(beam.token_ids) for beam in search.beams])
    told: dict[tuple[int, ...], tuple[float, float]] = {}
    for sequence in every_sequence(4):
        parts = [logprobs_after(sequence[:place])[token] for place, token in enumerate(sequence)]
        told[sequence] = (sum(parts) / len(sequence) ** length_penalty, sum(parts))
    best = sorted(told, key=lambda sequence: -told[sequence][0])
    assert len(search.hypotheses) == 50
    for hypothesis, sequence in zip(search.hypotheses[:10], best, strict=False):
        assert hypothesis.token_ids == sequence
        assert (hypothesis.score, hypothesis.log_probability) == pytest.approx(told[sequence])
        parts = [logprobs_after(sequence[:place])[token] for place, token in enumerate(sequence)]
        assert hypothesis.logprobs == pytest.approx(parts)
        ranks = [1 + ranked_after(sequence[:place])[0].index(token) for place, token in enumerate(sequence)]
        assert list(hypothesis.ranks) == ranks


def search_of(**options: object) -> BeamSearch:
    given = {"beam_width": 2, "max_tokens": 9, "end_token_ids": frozenset([END]), **options}
    return BeamSearch(**given)  # type: ignore[arg-type]  # fields of several types


def test_the_best_that_do_not_end_go_on_and_those_that_end_are_kept() -> None:
    search = search_of()
    assert search.num_candidates == 4
    assert search.advance([([5, END, 6, 7], [-1.0, -1.5, -2.0, -3.0])]) == [Continuation(0, 5), Continuation(0, 6)]
    assert [(beam.token_ids, beam.log_probability) for beam in search.beams] == [((5,), -1.0), ((6,), -2.0)]
    [hypothesis] = search.hypotheses
    assert (hypothesis.token_ids, hypothesis.log_probability, hypothesis.ranks) == ((END,), -1.5, (2,))
    going_on = search.advance([([5, 6], [-2.5, -2.6]), ([8, END], [-0.5, -0.6])])
    assert going_on == [Continuation(1, 8), Continuation(0, 5)]
    assert [hypothesis.token_ids for hypothesis in search.hypotheses] == [(6, END), (END,)]
    assert [round(hypothesis.score, 6) for hypothesis in search.hypotheses] == [-1.3, -1.5]


def test_an_end_below_the_width_is_no_hypothesis() -> None:
    search = search_of()
    search.advance([([5, 6, END, 7], [-1.0, -1.1, -1.2, -1.3])])
    assert search.hypotheses == []
    assert [beam.token_ids for beam in search.beams] == [(5,), (6,)]


@pytest.mark.parametrize(
    ("early_stopping", "num_steps"),
    [("first", 2), ("heuristic", 3), ("never", 4)],
)
def test_ways_to_end(early_stopping: EarlyStopping, num_steps: int) -> None:
    """Two hypotheses stand after two steps; a beam of -2.2 is better than the worst of them for some steps yet."""
    search = search_of(early_stopping=early_stopping, max_tokens=4)
    steps = [
        [([END, 5, 6, 7], [-1.0, -1.1, -4.0, -9.0])],
        [([5, END, 6, 7], [-1.1, -1.2, -9.0, -9.0]), ([5, 6, 7, 8], [-9.0] * 4)],
        [([5, 6, 7, 8], [-1.3, -9.0, -9.0, -9.0]), ([5, 6, 7, 8], [-9.0] * 4)],
        [([5, 6, 7, 8], [-0.1, -9.0, -9.0, -9.0]), ([5, 6, 7, 8], [-9.0] * 4)],
    ]
    done = 0
    while search.beams:
        search.advance(steps[done])
        done += 1
        assert len(search.hypotheses) == min(done, 2)
    assert done == num_steps
    assert [hypothesis.token_ids for hypothesis in search.hypotheses] == (
        [(5, 5, 5, 5), (END,)] if early_stopping == "never" else [(END,), (5, END)]
    )


def test_the_end_of_the_length_ends_all() -> None:
    search = search_of(max_tokens=1)
    assert search.advance([([5, 6, 7, 8], [-1.0, -1.1, -1.2, -1.3])]) == []
    assert [hypothesis.token_ids for hypothesis in search.hypotheses] == [(5,), (6,)]
    assert search.beams == []


def test_what_cannot_be_is_no_candidate() -> None:
    search = search_of()
    assert search.advance([([5, 6, 7, 8], [-1.0, -math.inf, -math.inf, -math.inf])]) == [Continuation(0, 5)]
    assert len(search.beams) == 1


@pytest.mark.parametrize(("num_ends", "num_candidates"), [(0, 6), (1, 6), (2, 9), (4, 15)])
def test_candidates_are_enough_for_all_ends(num_ends: int, num_candidates: int) -> None:
    ends = frozenset(range(num_ends))
    assert search_of(beam_width=3, end_token_ids=ends).num_candidates == num_candidates
