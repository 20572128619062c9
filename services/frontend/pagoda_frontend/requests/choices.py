"""How many sequences a call generates and which of them it returns: n, best_of and beam search. No engine in here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.beam_search import BeamSearchParams, EarlyStopping
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagoda_frontend.openai.protocol import GenerationBody
from pagoda_frontend.requests.run import CollectedSequence

MAX_BEST_OF = 20
"""OpenAI's."""

EARLY_STOPPING: dict[bool | str | None, EarlyStopping] = {
    None: "heuristic",
    False: "heuristic",
    True: "first",
    "never": "never",
}
"""As in transformers' generate."""

NOT_WITH_BEAM_SEARCH = [
    (name, row)
    for row in SAMPLING_FIELDS.values()
    if row.search == "refused"
    for name in dict.fromkeys((row.name_in("chat") or row.name, row.name))
]
"""Sampling fields that a beam search refuses, by their names in bodies and in SamplingParams: the search uses the
model's own probabilities."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Number of sequences that are returned and generated for each prompt."""

    n: int
    """Sequences returned."""
    num_generated: int
    """Sequences generated, at least n."""
    beam_search: BeamSearchParams | None = None

    @property
    def is_chosen(self) -> bool:
        """Whether more sequences are generated than returned."""
        return self.num_generated > self.n

    def best(self, sequences: Sequence[CollectedSequence]) -> list[CollectedSequence]:
        """The n sequences of each prompt with the highest mean log probability, best first, numbered again from 0."""
        if not self.is_chosen:
            return list(sequences)
        chosen: list[CollectedSequence] = []
        for start in range(0, len(sequences), self.num_generated):
            ranked = sorted(sequences[start : start + self.num_generated], key=_mean_logprob, reverse=True)
            chosen += ranked[: self.n]
        for index, sequence in enumerate(chosen):
            sequence.index = index
        return chosen


def _mean_logprob(sequence: CollectedSequence) -> float:
    values = [position.logprobs[0] for position in sequence.logprobs]
    return sum(values) / len(values) if values else -math.inf


def choices_of(
    body: GenerationBody,
    *,
    best_of: int | None,
    with_logprobs: bool,
    beam_search: BeamSearchParams | None = None,
) -> Choices:
    """The options of `body`.

    Args:
        best_of: None if the endpoint has no such field.
        with_logprobs: the client requests log probabilities.
        beam_search: None takes the body's value.

    Raises:
        InvalidRequest: `field` names the field.
    """
    n = 1 if body.n is None else body.n
    if n < 1:
        raise InvalidRequest(f"n must be at least 1, got {n}", field="n")
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of must be at least n ({n}), got {best_of}", field="best_of")
    if best_of is not None and best_of > MAX_BEST_OF:
        raise InvalidRequest(f"best_of must be at most {MAX_BEST_OF}, got {best_of}", field="best_of")
    if body.use_beam_search and beam_search is None:
        beam_search = BeamSearchParams(
            beam_width=best_of or n,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            early_stopping=EARLY_STOPPING[body.early_stopping],
        )
    if beam_search is not None:
        check_searchable(body, with_logprobs=with_logprobs)
        return Choices(n=n, num_generated=n, beam_search=beam_search)
    num_generated = best_of or n
    if body.stream and num_generated > n:
        raise InvalidRequest(f"best_of must be n ({n}) in a stream, got {num_generated}", field="best_of")
    return Choices(n=n, num_generated=num_generated)


def check_searchable(asked: GenerationBody | SamplingParams, *, with_logprobs: bool) -> None:
    """Refuse fields that a beam search does not support.

    Raises:
        InvalidRequest: `field` names the field.
    """
    if with_logprobs:
        raise InvalidRequest("logprobs are not supported with beam search", field="logprobs")
    for name, row in NOT_WITH_BEAM_SEARCH:
        if row.is_set(getattr(asked, name, None)):
            raise InvalidRequest(f"{name} is not supported with beam search", field=name)
