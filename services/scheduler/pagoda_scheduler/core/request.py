"""Request: one sequence of a client's request, its token log and the progress of its computation. No policy."""

import functools
from array import array
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

from pagoda_common.config.speculative_config import takes_drafts
from pagoda_common.errors import PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import FinishReason
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams


class RequestStatus(Enum):
    """State of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class BeamSequences(Protocol):
    """Interface of a beam search for its sequences (beams/beam_group.py)."""

    sequences: "list[Request]"
    """The client's sequences."""
    beams: "list[Request]"
    """The beams that run in their place."""

    def start(self) -> "Request":
        """Start the search, or restart it after a loss; returns the first beam."""


class _HotFields:
    """Fields that every step uses of every sequence. __slots__ lie in memory in order of their names, a base class's
    first, so these fill two cache lines instead of six; between two steps, other code has used the CPU caches."""

    __slots__ = (
        "block_ids",
        "end_token_ids",
        "is_announced",
        "is_beam",
        "max_num_tokens",
        "num_computed_tokens",
        "num_crashes",
        "num_lookahead",
        "num_pending",
        "num_tokens",
        "output_token_ids",
        "slot",
        "status",
        "takes_drafts",
    )


class Request(_HotFields):
    """A sequence: prompt, output so far, and how much of both is in the KV cache.

    `num_tokens` counts prompt, known output and `num_pending` tokens that a step in flight will sample. With drafts
    this is the minimum; the worker may have up to `num_lookahead` tokens more.
    """

    __slots__ = (
        "admitted_ns",
        "arrival_ns",
        "attempt",
        "beam_group",
        "block_hashes",
        "branch_point",
        "cache_salt",
        "client",
        "embedding",
        "eos_token_ids",
        "error",
        "finish_reason",
        "first_blocks",
        "first_cached_tokens",
        "group",
        "group_block_ids",
        "held_state",
        "index",
        "is_uncached",
        "leader",
        "lora",
        "num_cached_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "pooling",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampled_token_id",
        "sampling_params",
        "session_slot",
        "sink",
        "stop_token_id",
        "stop_token_ids",
        "tenant",
        "unnamed_states",
        "waits_for_siblings",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: Iterable[int],
        sampling_params: SamplingParams,
        max_model_len: int,
        index: int = 0,
        attempt: int = 0,
        eos_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
        priority: int = 0,
        arrival_ns: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        group: str = "",
        client: str = "",
        sink: object | None = None,
        session_slot: int = 0,
        pooling: PoolingParams | None = None,
        lora: LoraAdapter | None = None,
    ) -> None:
        """`prompt_token_ids` as an array("I") is kept, not copied. `eos_token_ids` are ignored when the sampling
        parameters say so; the seed must be set. With `pooling` the sequence ends with its embedding, and max_tokens
        must be 1: the step that computes the last prompt token is its last."""
        self.request_id = request_id
        self.index = index
        self.attempt = attempt
        if not isinstance(prompt_token_ids, array):
            prompt_token_ids = array("I", prompt_token_ids)
        self.prompt_token_ids: array[int] = prompt_token_ids
        self.output_token_ids = list(output_token_ids)
        self.sampling_params = sampling_params
        self.eos_token_ids = () if sampling_params.ignore_eos else tuple(eos_token_ids)
        self.stop_token_ids = _token_set(tuple(sampling_params.stop_token_ids or ()))
        self.end_token_ids = _token_set((*self.stop_token_ids, *self.eos_token_ids))
        self.priority = priority
        self.arrival_ns = arrival_ns
        self.admitted_ns = 0
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.group = group or request_id
        """The client's call that the sequence belongs to."""
        self.client = client
        """The client for the queue's shares; empty: none in particular."""
        self.sink = sink
        """Receives its tokens; None when its frontend is gone."""
        self.beam_group: BeamSequences | None = None
        """The beam search that the sequence waits for, or belongs to as a beam."""
        self.leader: Request | None = None
        """The first sequence of the same request, whose computed prompt is shared."""
        self.session_slot = session_slot
        self.pooling = pooling
        self.lora = lora
        """The adapter of all its tokens."""
        self.embedding = b""
        """The result with `pooling`, once computed: little-endian float32."""

        self.num_prompt_tokens = len(self.prompt_token_ids)
        limit = max_model_len - self.num_prompt_tokens
        max_tokens = sampling_params.max_tokens
        self.max_num_tokens = self.num_prompt_tokens + (limit if max_tokens is None else min(max_tokens, limit))
        self.num_pending = 0
        self.num_lookahead = 0
        """Draft tokens of steps in flight: the worker may have this many tokens more than `num_tokens`."""
        self.takes_drafts = pooling is None and takes_drafts(sampling_params)
        """Whether the worker may draft its next tokens."""
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.num_crashes = 0
        """Number of worker losses while the sequence was in flight, since its last token."""
        self.first_cached_tokens = 0
        """Number of tokens that its first admission found in the cache; for a resumed request with output tokens.
        """
        self.is_announced = False
        self.is_beam = False
        self.waits_for_siblings = False
        """For a beam: it has given its candidates and waits for its siblings."""
        self.sampled_token_id = -1
        """For a beam: the token that the worker has appended to its log."""
        self.is_uncached = sampling_params.prompt_logprobs is not None
        """Whether the prefix cache is not used, because prefix hits would hide prompt logprobs."""

        self.status = RequestStatus.WAITING
        self.slot = -1
        self.block_ids: list[int] = []
        """Block table of the first cache group with blocks."""
        self.group_block_ids: list[list[int]] = []
        """Block tables of the other groups with blocks, each as long as `block_ids`."""
        self.first_blocks: list[int] = []
        """For each table, if some group has a window: number of entries at its start that are no longer blocks."""
        self.block_hashes: list[bytes] = []
        self.branch_point = 0
        """Number of tokens shared with an earlier prompt according to blocks, where the recurrent state is missing."""
        self.held_state = -1
        """Snapshot of its recurrent state after all computed tokens; -1: none."""
        self.unnamed_states: list[tuple[int, int]] = []
        """Number of tokens, and the snapshot of the recurrent state after them, while not all of these tokens are
        known."""
        self.num_cached_blocks = 0
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.error: PagodaError | None = None

    def learn_model(self, *, max_model_len: int, eos_token_ids: Sequence[int]) -> None:
        """Apply the model's bounds to a request that came before any worker had loaded the model."""
        self.max_num_tokens = min(self.max_num_tokens, max_model_len)
        if not self.eos_token_ids and not self.sampling_params.ignore_eos:
            self.eos_token_ids = tuple(eos_token_ids)
            self.end_token_ids = _token_set((*self.stop_token_ids, *self.eos_token_ids))

    def derive(self, *, sampling_params: SamplingParams, output_token_ids: list[int]) -> "Request":
        """A beam next to this sequence: the same prompt, its own output, one token at a time."""
        beam = Request(
            request_id=self.request_id,
            index=self.index,
            attempt=self.attempt,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=output_token_ids,
            sampling_params=sampling_params,
            max_model_len=self.max_num_tokens,
            priority=self.priority,
            arrival_ns=self.arrival_ns,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            group=self.group,
            client=self.client,
            lora=self.lora,
        )
        beam.beam_group = self.beam_group
        beam.is_beam = True
        beam.takes_drafts = False
        beam.eos_token_ids = self.eos_token_ids  # its constraint ends there; the search decides whether the beam ends
        beam.is_announced = True
        beam.max_num_tokens = beam.num_tokens + 1
        return beam

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.status is RequestStatus.FINISHED

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the cache, as reported to clients."""
        return min(self.first_cached_tokens, self.num_prompt_tokens)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the sequence holds, of all cache groups."""
        entries = len(self.block_ids) * (1 + len(self.group_block_ids))
        return entries - sum(self.first_blocks)

    @property
    def has_computed_prompt(self) -> bool:
        """Whether its blocks hold its whole prompt, once the steps sent so far have run."""
        return self.status is RequestStatus.RUNNING and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def is_behind_leader(self) -> bool:
        """Whether its leader is computing the shared prompt right now, so that waiting saves the work."""
        leader = self.leader
        return leader is not None and leader.status is RequestStatus.RUNNING and not leader.has_computed_prompt

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt and output tokens whose ids are known here."""
        return self.num_tokens - self.num_pending

    def known_tokens(self, start: int, stop: int) -> Sequence[int]:
        """Token ids at positions [start, stop) of prompt plus output."""
        num_prompt = self.num_prompt_tokens
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: stop - num_prompt]]

    def check_finished(self) -> bool:
        """Set finish_reason if the last output token ends the sequence; returns whether it does."""
        output = self.output_token_ids
        if not output:
            return False
        if output[-1] in self.end_token_ids and len(output) >= self.sampling_params.min_tokens:
            self.finish_reason = "stop"
            if output[-1] in self.stop_token_ids and output[-1] not in self.eos_token_ids:
                self.stop_token_id = output[-1]
        elif self.num_prompt_tokens + len(output) >= self.max_num_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def settle(self, *, num_accepted: int, num_ahead: int) -> None:
        """A step with up to `num_ahead` draft tokens was answered: `num_accepted` of them were accepted. They count as
        pending until they are appended."""
        self.num_lookahead -= num_ahead
        if num_accepted:
            self.num_tokens += num_accepted
            self.num_pending += num_accepted
            if self.status is RequestStatus.RUNNING:  # otherwise it was preempted meanwhile, and nothing is computed
                self.num_computed_tokens += num_accepted

    def forget_computed(self) -> None:
        """Reset: no KV cache holds any of its tokens, and no step in flight includes it."""
        self.num_tokens -= self.num_pending
        self.num_pending = 0
        self.num_lookahead = 0
        self.num_computed_tokens = 0
        self.slot = -1
        self.block_ids = []
        self.group_block_ids = []
        self.first_blocks = []
        self.held_state = -1
        self.unnamed_states = []
        self.num_cached_blocks = 0
        self.status = RequestStatus.WAITING

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens}/{self.num_tokens}"
        return f"Request({self.request_id}/{self.index}, {self.status.value}, {progress})"


@functools.lru_cache(maxsize=256)
def _token_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    """A shared set for the same tokens: most requests have the same stop tokens."""
    return frozenset(token_ids)
