"""What a scheduler takes in: bounds on a request, and on what waits. Knows requests and queues; no blocks."""

from collections.abc import Collection

from pagoda_common.config import SchedulerConfig
from pagoda_common.errors import QueueFull, RequestTooLong
from pagoda_scheduler.request import Request
from pagoda_scheduler.waiting_queue import WaitingQueue


def check_queue(config: SchedulerConfig, *, waiting: Collection[Request], requests: list[Request]) -> None:
    """Whether `requests` may wait beside those that wait for a worker group.

    Raises:
        QueueFull: a bound on the waiting queue would be passed.
    """
    if config.max_num_queued_reqs is not None or config.max_num_queued_tokens is not None:
        num_tokens = sum(request.num_prompt_tokens for request in waiting)
        _check_bounds(config, requests, num_reqs=len(waiting), num_tokens=num_tokens)


class Admission:
    """The bounds of one scheduler."""

    def __init__(self, *, config: SchedulerConfig, waiting: WaitingQueue, max_model_len: int) -> None:
        self._config = config
        self._waiting = waiting
        self._max_model_len = max_model_len

    def check(self, requests: list[Request]) -> None:
        """Whether `requests`, which are new, may be added.

        Raises:
            RequestTooLong: the prompt does not fit the context, or a step.
            QueueFull: a bound on the waiting queue would be passed.
        """
        self.check_fits(requests)
        waiting = self._waiting
        _check_bounds(self._config, requests, num_reqs=len(waiting), num_tokens=waiting.num_prompt_tokens)

    def check_fits(self, requests: list[Request]) -> None:
        """Whether `requests` can be computed at all: for those that were taken in before, the queue has no bound.

        Raises:
            RequestTooLong: the prompt does not fit the context, or a step.
        """
        for request in requests:
            num_tokens, budget = request.num_prompt_tokens, self._config.max_num_batched_tokens
            if num_tokens >= self._max_model_len:
                raise RequestTooLong(
                    f"prompt has {num_tokens} tokens, max_model_len is {self._max_model_len}"
                    " and at least 1 token must be left for the output",
                    field="prompt_token_ids",
                )
            if not self._config.enable_chunked_prefill and num_tokens > budget:
                raise RequestTooLong(
                    f"prompt has {num_tokens} tokens, max_num_batched_tokens is {budget} and chunked prefill is off",
                    field="prompt_token_ids",
                )


def _check_bounds(config: SchedulerConfig, requests: list[Request], *, num_reqs: int, num_tokens: int) -> None:
    """`num_reqs` sequences with `num_tokens` prompt tokens wait already."""
    max_reqs, max_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    if max_reqs is not None and num_reqs + len(requests) > max_reqs:
        raise QueueFull(f"{num_reqs} sequences are waiting, max_num_queued_reqs is {max_reqs}", retry_after_s=1)
    tokens = num_tokens + sum(request.num_prompt_tokens for request in requests)
    if max_tokens is not None and tokens > max_tokens:
        raise QueueFull(f"{tokens} prompt tokens would wait, max_num_queued_tokens is {max_tokens}", retry_after_s=1)
