"""BeamGroup: runs a beam search as sequences of the scheduler, one per beam. Knows requests; no blocks."""

from dataclasses import replace

import numpy as np

from pagoda_common.errors import InvalidRequest
from pagoda_scheduler.beams.beam_search import BeamSearch, Continuation, Hypothesis
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import LogprobRows
from pagoda_scheduler.core.step_result import StepResult


class BeamGroup:
    """The client's sequences, and the beams that run in their place until the search ends."""

    def __init__(self, *, sequences: list[Request], search: BeamSearch) -> None:
        """`sequences`: as many as hypotheses are wanted, at most beam_width; `search` has not begun."""
        self.sequences = sequences
        self.beams: list[Request] = []
        """Running and waiting beams, in the search's order."""
        self._new_search = search
        self._search = search
        self._candidates: dict[Request, tuple[list[int], list[float]]] = {}
        for sequence in sequences:
            sequence.beam_group = self

    def start(self) -> Request:
        """Start the search, or restart it after a loss; returns the first beam."""
        first, search = self.sequences[0], self._new_search
        self._search = BeamSearch(
            beam_width=search.beam_width,
            max_tokens=first.max_num_tokens - first.num_prompt_tokens,
            end_token_ids=first.end_token_ids,
            length_penalty=search.length_penalty,
            early_stopping=search.early_stopping,
        )
        self._candidates = {}
        params = replace(
            first.sampling_params, temperature=0.0, logprobs=self._search.num_candidates, ignore_eos=True, min_tokens=0
        )
        beam = first.derive(sampling_params=params, output_token_ids=[])
        self.beams = [beam]
        return beam

    def collect(self, beam: Request, logprobs: LogprobRows, row: int) -> bool:
        """Add one beam's candidates; whether all beams have given theirs."""
        index = int(np.searchsorted(logprobs.rows, row))
        end = int(logprobs.counts[: index + 1].sum())
        start = end - int(logprobs.counts[index]) + 1  # the sampled token is first, and again among the top
        self._candidates[beam] = (logprobs.token_ids[start:end].tolist(), logprobs.logprobs[start:end].tolist())
        return len(self._candidates) == len(self.beams)

    def advance(self) -> list[Continuation]:
        """The continuations of the next step; empty when the search is over."""
        candidates = [self._candidates[beam] for beam in self.beams]
        self._candidates = {}
        return self._search.advance(candidates)

    def hypothesis_of(self, sequence: Request) -> Hypothesis | None:
        """The output of a client's sequence after the search."""
        found = self._search.hypotheses
        place = sequence.index
        is_held = sequence in self.sequences and place < len(found)
        return found[place] if is_held and sequence.output_token_ids == list(found[place].token_ids) else None

    def deliver(self, result: StepResult) -> None:
        """Copy the hypotheses into the client's sequences, and add these to the step's result.

        All fail if there are too few hypotheses: a constraint may allow fewer outputs than requested.
        """
        found, wanted = len(self._search.hypotheses), len(self.sequences)
        if found < wanted:
            error = InvalidRequest(f"the beam search has found {found} outputs, {wanted} are wanted", field="n")
            for sequence in self.sequences:
                sequence.finish_reason, sequence.error = "error", error
            result.finished += self.sequences
            return
        for sequence, hypothesis in zip(self.sequences, self._search.hypotheses, strict=False):
            sequence.output_token_ids = list(hypothesis.token_ids)
            sequence.num_tokens = sequence.num_prompt_tokens + len(hypothesis.token_ids)
            if not sequence.check_finished():
                sequence.finish_reason = "length"
            count = len(hypothesis.token_ids)
            result.requests += [sequence] * count
            result.offsets += range(count)
            result.token_ids += hypothesis.token_ids
            result.rows += [-1] * count
            result.admitted.append(sequence)
            result.finished.append(sequence)
