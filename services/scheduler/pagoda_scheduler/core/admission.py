"""Admission to a scheduler: limits on a request and on the queue. Knows requests and queues; no blocks."""

import math

import numpy as np

from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_common.errors import Code, InvalidRequest, PagodaError, QueueFull, RequestTooLong, ShareFull
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.waiting_queue import WaitingQueue


def check_queue(config: SchedulerConfig, *, waiting: WaitingQueue, requests: list[Request]) -> None:
    """Check that `requests` may wait in addition to those that wait for a worker group.

    Raises:
        QueueFull: the waiting queue would exceed its bounds. ShareFull: the client would exceed its share of them.
    """
    max_reqs, max_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    num_reqs = len(waiting)
    if max_reqs and num_reqs + len(requests) > max_reqs:
        raise QueueFull(f"{num_reqs} sequences are waiting, max_num_queued_reqs is {max_reqs}", retry_after_s=1)
    tokens = waiting.num_prompt_tokens + sum(request.num_prompt_tokens for request in requests)
    if max_tokens and tokens > max_tokens:
        raise QueueFull(f"{tokens} prompt tokens would wait, max_num_queued_tokens is {max_tokens}", retry_after_s=1)
    if requests and (client := requests[0].client):
        _check_share(config, waiting=waiting, requests=requests, client=client)


def _check_share(config: SchedulerConfig, *, waiting: WaitingQueue, requests: list[Request], client: str) -> None:
    """Raises ShareFull when `client` would exceed its share of the queue's bounds."""
    share = waiting.share_of(client)
    max_reqs = math.ceil(config.max_num_queued_reqs * config.max_queued_share)
    max_tokens = math.ceil(config.max_num_queued_tokens * config.max_queued_share)
    if max_reqs and share.num_sequences + len(requests) > max_reqs:
        text = f"{share.num_sequences} sequences of this client are waiting, max_queued_share is {max_reqs}"
        raise ShareFull(text, retry_after_s=1)
    tokens = share.num_prompt_tokens + sum(request.num_prompt_tokens for request in requests)
    if max_tokens and tokens > max_tokens:
        text = f"{tokens} prompt tokens of this client would wait, max_queued_share is {max_tokens}"
        raise ShareFull(text, retry_after_s=1)


class Admission:
    """The bounds of one scheduler."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        max_model_len: int,
        vocab_size: int | None = None,
        only_pools: bool = False,
        takes_adapters: bool = False,
    ) -> None:
        """`vocab_size`: of the model; None accepts every token id. `only_pools`: the model generates no tokens.
        `takes_adapters`: the workers support LoRA adapters."""
        self._takes_adapters = takes_adapters
        self._only_pools = only_pools
        self._config = config
        self._waiting = waiting
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    def check(self, requests: list[Request]) -> None:
        """Check that `requests`, which are new, may be added.

        Raises:
            RequestTooLong, InvalidRequest: as in check_fits.
            QueueFull: the waiting queue would exceed its bounds.
        """
        self.check_fits(requests)
        check_queue(self._config, waiting=self._waiting, requests=requests)

    def check_fits(self, requests: list[Request]) -> None:
        """Check that `requests` can be computed at all, without the queue's bounds, which do not apply to accepted
        requests.

        Raises:
            RequestTooLong: the prompt does not fit the context, or a step.
            InvalidRequest: a token is not in the vocabulary, or the model does not generate text.
            PagodaError: the request has an adapter, and the workers do not support adapters.
        """
        for request in requests:
            if request.lora is not None and not self._takes_adapters:
                message = f"lora is {request.lora.name!r}, but the worker does not support adapters: upgrade the worker"
                raise PagodaError(message, field="lora", code=Code.UNIMPLEMENTED)
            num_tokens, budget = request.num_prompt_tokens, self._config.max_num_batched_tokens
            if self._only_pools and request.pooling is None:
                raise InvalidRequest(
                    "the model does not generate text: its requests need the field pooling", field="pooling"
                )
            if request.pooling is not None:
                if num_tokens > self._max_model_len:
                    text = f"prompt has {num_tokens} tokens, max_model_len is {self._max_model_len}"
                    raise RequestTooLong(text, field="prompt_token_ids")
            elif num_tokens >= self._max_model_len:
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
            if self._vocab_size is not None:
                _check_tokens(request, self._vocab_size)


def _check_tokens(request: Request, vocab_size: int) -> None:
    """Check all token ids: the request may have come before the model was known."""
    named = (("prompt_token_ids", request.prompt_token_ids), ("output_token_ids", request.output_token_ids))
    for field, token_ids in named:
        if len(token_ids) and (highest := int(np.max(token_ids))) >= vocab_size:
            raise InvalidRequest(f"{field} has token {highest}, the vocabulary has {vocab_size}", field=field)
