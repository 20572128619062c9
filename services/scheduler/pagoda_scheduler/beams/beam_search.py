"""The beam search algorithm: candidates in, continuations out. Knows token ids and scores; no requests, no blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagoda_common.params.beam_search import EarlyStopping


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that is not finished."""

    token_ids: tuple[int, ...]
    log_probability: float
    """Sum over its tokens."""
    logprobs: tuple[float, ...] = ()
    """One per token."""
    ranks: tuple[int, ...] = ()
    """Rank of each token among the possible ones; 1 is the likeliest."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence."""

    token_ids: tuple[int, ...]
    score: float
    """Log probability over length ** length_penalty."""
    log_probability: float = 0.0
    """Sum over its tokens."""
    logprobs: tuple[float, ...] = ()
    """One per token."""
    ranks: tuple[int, ...] = ()
    """Rank of each token among the possible ones; 1 is the likeliest."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One beam of the next step: beam `parent` of this step plus one token."""

    parent: int
    token_id: int


class _Candidate(NamedTuple):
    """A beam plus one token."""

    score: float
    """Log probability of all its tokens."""
    parent: int
    token_id: int
    logprob: float
    rank: int


class BeamSearch:
    """One search. Call `advance` until it returns nothing; then `hypotheses` are the result, best first.

    The rules are those of transformers' generate(num_beams=…, do_sample=False): of the best `num_candidates`
    continuations of all beams, those among the best `beam_width` that end become hypotheses, and the best `beam_width`
    that do not end continue. early_stopping: "first" ends with `beam_width` hypotheses; "heuristic" (False there) ends
    when the best beam at its present length cannot beat the worst hypothesis; "never" judges it at full length.
    """

    def __init__(
        self,
        *,
        beam_width: int,
        max_tokens: int,
        end_token_ids: frozenset[int],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = "heuristic",
    ) -> None:
        self.beam_width = beam_width
        self.num_candidates = max(2, 1 + len(end_token_ids)) * beam_width
        """Number of candidates that each beam must give."""
        self.beams: list[Beam] = [Beam((), 0.0)]
        self.hypotheses: list[Hypothesis] = []
        self.max_tokens = max_tokens
        self.end_token_ids = end_token_ids
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self._can_improve = True

    def advance(self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]]) -> list[Continuation]:
        """One step. Takes for each beam its likeliest next tokens and their log probabilities, best first; -inf entries
        do not count."""
        scored = [
            _Candidate(beam.log_probability + logprob, parent, token_id, logprob, rank)
            for parent, (beam, (token_ids, logprobs)) in enumerate(zip(self.beams, candidates, strict=True))
            for rank, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), start=1)
            if logprob > -math.inf
        ]
        scored.sort(key=lambda candidate: -candidate.score)
        best = scored[: self.num_candidates]
        length = len(self.beams[0].token_ids) + 1
        ends = [candidate.token_id in self.end_token_ids or length >= self.max_tokens for candidate in best]
        going_on = [candidate for candidate, is_end in zip(best, ends, strict=True) if not is_end][: self.beam_width]
        ended = [c for c, is_end in zip(best[: self.beam_width], ends[: self.beam_width], strict=True) if is_end]
        self._finish(ended, length)
        if not going_on or self._is_over(going_on[0].score, length):
            self.beams = []
            return []
        self.beams = [self._grown(candidate) for candidate in going_on]
        return [Continuation(candidate.parent, candidate.token_id) for candidate in going_on]

    def _grown(self, candidate: "_Candidate") -> Beam:
        parent = self.beams[candidate.parent]
        return Beam(
            token_ids=(*parent.token_ids, candidate.token_id),
            log_probability=candidate.score,
            logprobs=(*parent.logprobs, candidate.logprob),
            ranks=(*parent.ranks, candidate.rank),
        )

    def _finish(self, ended: list["_Candidate"], length: int) -> None:
        is_full = len(self.hypotheses) == self.beam_width
        if not self._can_improve or (is_full and self.early_stopping == "first"):
            return
        for candidate in ended:
            beam = self._grown(candidate)
            score = candidate.score / length**self.length_penalty
            self.hypotheses.append(Hypothesis(beam.token_ids, score, beam.log_probability, beam.logprobs, beam.ranks))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.beam_width :]

    def _is_over(self, best_score: float, length: int) -> bool:
        if len(self.hypotheses) < self.beam_width:
            return False
        at_full_length = self.early_stopping == "never" and self.length_penalty > 0
        best_possible = best_score / (self.max_tokens if at_full_length else length) ** self.length_penalty
        self._can_improve = self._can_improve and best_possible > self.hypotheses[-1].score
        return self.early_stopping == "first" or not self._can_improve
