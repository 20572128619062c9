"""BeamSearchParams: options of beam search, which replaces sampling. The names are vLLM's."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagoda_common.errors import InvalidRequest

EarlyStopping: TypeAlias = Literal["heuristic", "first", "never"]

MAX_LENGTH_PENALTY = 10.0
"""Far beyond what makes sense, and small enough that no length to its power leaves the range of a float."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """The request's n sequences are the n best hypotheses, best first, and arrive all at once.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names it.
    """

    beam_width: int
    """Beams kept at every step, at least n."""
    length_penalty: float = 1.0
    """A hypothesis scores its log probability over its length to this power, -10 to 10."""
    early_stopping: EarlyStopping = "heuristic"
    """When a search with beam_width hypotheses ends: "first" at once; "heuristic" when the best beam, judged at its
    present length, cannot beat the worst of them; "never" when it cannot even at full length."""

    def __post_init__(self) -> None:
        if type(self.beam_width) is not int or self.beam_width < 1:
            raise InvalidRequest(f"beam_width must be at least 1, got {self.beam_width!r}", field="beam_width")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not math.isfinite(penalty):
            raise InvalidRequest(f"length_penalty must be a finite number, got {penalty!r}", field="length_penalty")
        if abs(penalty) > MAX_LENGTH_PENALTY:
            raise InvalidRequest(
                f"length_penalty must be between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}, got {penalty!r}",
                field="length_penalty",
            )
        if self.early_stopping not in ("heuristic", "first", "never"):
            raise InvalidRequest(
                f"early_stopping must be heuristic, first or never, got {self.early_stopping!r}",
                field="early_stopping",
            )
