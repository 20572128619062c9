"""Sink: where the tokens of some requests go. Implemented in rpc/sinks.py and vllm_engine/sink.py."""

from typing import Protocol

from pagoda_common.errors import PagodaError
from pagoda_scheduler.core.step_result import StepResult


class Sink(Protocol):
    """Where the tokens of some requests go: a frontend's session, or one client's stream."""

    @property
    def is_behind(self) -> bool:
        """Its reader is too slow: its sequences are parked until `Engine.unpark`."""

    def push(self, result: StepResult) -> None:
        """Take one step's news of this sink's sequences; returns at once."""

    def announce(self) -> None:
        """Load or model have changed outside of a step; returns at once."""

    def close(self, error: PagodaError) -> None:
        """End the stream: nothing more can be sent on it."""
