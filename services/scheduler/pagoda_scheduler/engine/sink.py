"""Sink: interface of a receiver of tokens. Implemented in rpc/sinks.py and vllm_engine/sink.py."""

from typing import Protocol

from pagoda_common.errors import PagodaError
from pagoda_scheduler.core.step_result import StepResult


class Sink(Protocol):
    """Receives the tokens of some requests: a frontend's session, or one client's stream."""

    @property
    def is_behind(self) -> bool:
        """Whether its reader is too slow: its sequences are parked until `Engine.unpark`."""

    def push(self, result: StepResult) -> None:
        """Take one step's tokens of this sink's sequences; returns at once."""

    def announce(self) -> None:
        """Load or model changed outside of a step; returns at once."""

    def close(self, error: PagodaError) -> None:
        """End the stream."""
