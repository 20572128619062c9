"""Speculation: decides how many draft tokens sequences may try, and counts accepted ones. No tensors."""

from dataclasses import dataclass, field

from pagoda_scheduler.core.request import Request


@dataclass(slots=True)
class SpeculationCounters:
    """Counters of drafts, which only grow."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """Accepted tokens by position in the draft."""

    def count(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One sequence's draft of one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        per_pos = self.num_accepted_tokens_per_pos
        per_pos += [0] * (num_draft_tokens - len(per_pos))
        for position in range(num_accepted):
            per_pos[position] += 1

    def add(self, other: "SpeculationCounters") -> None:
        """Add the counters of another group."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        per_pos = self.num_accepted_tokens_per_pos
        per_pos += [0] * (len(other.num_accepted_tokens_per_pos) - len(per_pos))
        for position, number in enumerate(other.num_accepted_tokens_per_pos):
            per_pos[position] += number


class Speculation:
    """The lookahead of one worker group.

    The worker makes the drafts from its own token logs. So a step may be sent before it is known how many draft tokens
    of the step before were accepted: a sequence's counts here are the minimum, and `num_lookahead` says how many more
    tokens the worker may have. Blocks are reserved for all of them.
    """

    def __init__(self, *, num_speculative_tokens: int) -> None:
        """`num_speculative_tokens`: maximum draft tokens of a sequence in a step; 0: no drafts."""
        self.num_speculative_tokens = num_speculative_tokens
        self.counters = SpeculationCounters()

    def num_ahead(self, request: Request, spare: int) -> int:
        """Number of draft tokens that a sequence may try in its next step; `spare`: tokens that the step has room for.

        A sequence does not draft beyond its last token; beams, and sequences whose sampling needs state, do not draft.
        """
        if not request.takes_drafts:
            return 0
        # Not min(): this runs for every sequence in every step.
        num_ahead = self.num_speculative_tokens if self.num_speculative_tokens < spare else spare
        room = request.max_num_tokens - request.num_tokens - 1
        return max(num_ahead if num_ahead < room else room, 0)

    def count(self, num_draft_tokens: list[int], num_sampled_tokens: list[int] | None) -> None:
        """Count a step's drafts, in batch order."""
        for row, num_draft in enumerate(num_draft_tokens):
            if num_draft:
                num_sampled = 1 if num_sampled_tokens is None else num_sampled_tokens[row]
                self.counters.count(num_draft, min(max(num_sampled - 1, 0), num_draft))
