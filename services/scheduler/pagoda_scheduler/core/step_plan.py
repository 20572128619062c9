"""StepPlan: builds the next step. Knows requests and block ids; no policy."""

from dataclasses import dataclass, field
from typing import Protocol

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import NewRequestData, SchedulerOutput
from pagoda_scheduler.kv.transfers import Transfers

MAX_NEW_BYTES = 8 * 1024**2
"""Maximum size of the sequences that enter slots in one step, as sent to the worker: prompts, outputs and large
parameters. Further sequences enter in the next step; a single sequence may be larger."""


class Adapters(Protocol):
    """The interface of adapters for a step (adapters/adapter_pool.py)."""

    def number_of(self, request: Request) -> int:
        """Number by which the workers know a sequence's adapter; 0: no adapter."""

    def take_removals(self) -> list[int]:
        """Numbers of adapters that the workers drop with the step."""


@dataclass(slots=True)
class StepPlan:
    """How many tokens each sequence computes, and its new blocks."""

    budget: int
    """Tokens that the step still has room for."""
    num_tables: int = 1
    """Block tables of a sequence."""
    scheduled: dict[Request, int] = field(default_factory=dict)
    """Tokens by sequence, in batch order."""
    ahead: dict[Request, int] = field(default_factory=dict)
    """Draft tokens that a sequence may try in addition; no entry for 0."""
    appended: dict[Request, list[int]] = field(default_factory=dict)
    """New blocks of running sequences: the same number for every table, table by table."""
    admitted: dict[Request, int] = field(default_factory=dict)
    """Sequences that enter a slot, and their numbers of cached tokens, some of which this step may write first.
    """
    num_new_bytes: int = 0
    """Approximate bytes of these sequences on the wire."""

    def can_admit(self, request: Request) -> bool:
        """Whether the step's message has room for one more sequence in full."""
        return not self.admitted or self.num_new_bytes + _num_bytes(request) <= MAX_NEW_BYTES

    def admit(self, request: Request, num_tokens: int, *, num_cached_tokens: int) -> None:
        """Add a sequence that enters a slot."""
        self.add(request, num_tokens)
        self.admitted[request] = num_cached_tokens
        self.num_new_bytes += _num_bytes(request)

    def add(self, request: Request, num_tokens: int, *, num_ahead: int = 0, blocks: list[int] | None = None) -> None:
        """Add a sequence to the step."""
        self.scheduled[request] = num_tokens
        self.budget -= num_tokens + num_ahead
        if num_ahead:
            self.ahead[request] = num_ahead
        if blocks:
            self.appended[request] = blocks

    def drop(self, request: Request) -> None:
        """Remove a sequence, if it is in the step."""
        self.budget += self.scheduled.pop(request, 0) + self.ahead.pop(request, 0)
        self.appended.pop(request, None)

    def output(
        self, *, step: int, freed_slots: list[int], transfers: Transfers, adapters: Adapters | None = None
    ) -> SchedulerOutput:
        """The step for the worker. `adapters`: of the sequences; None: no sequence has one."""
        number_of = no_adapter if adapters is None else adapters.number_of
        ahead, appended = self.ahead, self.appended.items()
        num_scheduled_tokens = list(self.scheduled.values())
        return SchedulerOutput(
            step=step,
            new_requests=[
                _new_request_data(request, computed, number_of(request)) for request, computed in self.admitted.items()
            ],
            freed_slots=freed_slots,
            slots=[request.slot for request in self.scheduled],
            num_scheduled_tokens=num_scheduled_tokens,
            appended_slots=[request.slot for request, blocks in appended for _ in blocks] if appended else [],
            appended_block_ids=[block_id for _, blocks in appended for block_id in blocks] if appended else [],
            num_tokens=sum(num_scheduled_tokens),
            blocks_to_swap_out=[(block_id, host_block) for host_block, block_id in transfers.swap_out.items()],
            blocks_to_swap_in=transfers.swap_in,
            blocks_to_copy=[(source, target) for target, source in transfers.copy.items()],
            num_lookahead_tokens=[ahead.get(request, 0) for request in self.scheduled] if ahead else None,
            states_to_load=transfers.states_to_load,
            states_to_save=transfers.states_to_save,
            states_to_swap_out=transfers.states_to_swap_out,
            states_to_swap_in=transfers.states_to_swap_in,
            appended_groups=self._appended_groups() if appended and self.num_tables > 1 else (),
            loras_to_remove=() if adapters is None else adapters.take_removals(),
        )

    def _appended_groups(self) -> list[int]:
        """The table that each appended block is for."""
        return [
            place * self.num_tables // len(blocks) for blocks in self.appended.values() for place in range(len(blocks))
        ]


def _num_bytes(request: Request) -> int:
    return 4 * request.num_tokens + request.sampling_params.num_bytes


def no_adapter(request: Request) -> int:
    """The number of a sequence's adapter where there are none."""
    return 0


def _new_request_data(request: Request, num_cached: int, lora_number: int) -> NewRequestData:
    return NewRequestData(
        slot=request.slot,
        request_id=f"{request.request_id}/{request.index}",
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=list(request.output_token_ids),
        sampling_params=request.sampling_params,
        eos_token_ids=request.eos_token_ids,
        block_ids=list(request.block_ids),
        num_computed_tokens=num_cached,
        is_beam=request.is_beam,
        pooling=request.pooling,
        group_block_ids=[list(table) for table in request.group_block_ids],
        lora_number=lora_number,
    )
