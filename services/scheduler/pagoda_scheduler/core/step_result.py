"""StepResult: the tokens that one step gave to requests. Knows requests; no worker, no sinks."""

from dataclasses import dataclass, field

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import LogprobRows, PromptLogprobRows


@dataclass(slots=True)
class StepResult:
    """The results of one step: columns aligned over the tokens, and the sequences that ended.

    Several tokens of one sequence are adjacent, in order.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Index of the token in the sequence's output."""
    token_ids: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Row of the token in the worker's token_ids, which logprobs refer to."""
    logprobs: LogprobRows | None = None
    admitted: list[Request] = field(default_factory=list)
    """Sequences that got their first token here."""
    prompt_logprobs: list[tuple[Request, PromptLogprobRows]] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)

    def add_token(self, request: Request, token_id: int, row: int) -> None:
        """`request` got one token, now its last: row `row` of the worker's token_ids."""
        self.requests.append(request)
        self.offsets.append(len(request.output_token_ids) - 1)
        self.token_ids.append(token_id)
        self.rows.append(row)

    def add_last_tokens(self, batch: list[Request], rows: list[int], token_ids: list[int]) -> None:
        """The sequences at `rows` of a batch got one token each, now their last: rows `rows` of `token_ids`."""
        requests = batch if len(rows) == len(batch) else [batch[row] for row in rows]
        self.requests += requests
        self.offsets += [len(request.output_token_ids) - 1 for request in requests]
        self.token_ids += token_ids if len(rows) == len(token_ids) else [token_ids[row] for row in rows]
        self.rows += rows

    def by_sink(self) -> dict[object, "StepResult"]:
        """The results by sink; sequences without a sink, whose frontend is lost, are omitted."""
        parts: dict[object, StepResult] = {}

        def part_of(request: Request) -> StepResult | None:
            sink = request.sink
            if sink is None:
                return None
            if sink not in parts:
                parts[sink] = StepResult(step=self.step, logprobs=self.logprobs)
            return parts[sink]

        columns = zip(self.requests, self.offsets, self.token_ids, self.rows, strict=True)
        for request, offset, token_id, row in columns:
            if (part := part_of(request)) is not None:
                part.requests.append(request)
                part.offsets.append(offset)
                part.token_ids.append(token_id)
                part.rows.append(row)
        for request in self.admitted:
            if (part := part_of(request)) is not None:
                part.admitted.append(request)
        for request, chunk in self.prompt_logprobs:
            if (part := part_of(request)) is not None:
                part.prompt_logprobs.append((request, chunk))
        for request in self.finished:
            if (part := part_of(request)) is not None:
                part.finished.append(request)
        return parts
