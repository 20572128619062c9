"""Keeps running and recently ended calls for the status page. Knows no HTTP and no engine."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagoda_common.errors import PagodaError
from pagoda_common.params.outputs import SequenceDelta

MAX_ENDED = 50
"""Number of ended calls that are kept."""
MAX_SHOWN = 200
"""Number of running calls that are shown, the oldest first."""
MAX_REASON_CHARS = 200

State: TypeAlias = Literal["running", "finished", "aborted", "failed"]


@dataclass(slots=True)
class LoggedCall:
    """One call."""

    request_id: str
    tenant: str
    num_prompt_tokens: int
    num_sequences: int
    started_s: float
    """Unix time."""
    num_output_tokens: int = 0
    num_finished: int = 0
    """Sequences that have ended."""
    first_token_s: float | None = None
    """Seconds after the start."""
    duration_s: float | None = None
    """None while it runs."""
    state: State = "running"
    reason: str = ""
    """Why it ended: finish reasons, or the error."""

    def add(self, deltas: list[SequenceDelta], *, num_output_tokens: int) -> None:
        """Note new tokens and ends; `num_output_tokens` is the sum by now."""
        if num_output_tokens and self.first_token_s is None:
            self.first_token_s = time.time() - self.started_s
        self.num_output_tokens = num_output_tokens
        for delta in deltas:
            if delta.finish_reason is None:
                continue
            self.num_finished += 1
            if delta.finish_reason not in self.reason:
                self.reason = f"{self.reason}, {delta.finish_reason}" if self.reason else delta.finish_reason


class RequestLog:
    """The calls of one frontend. Belongs to its event loop."""

    def __init__(self) -> None:
        self._running: dict[int, LoggedCall] = {}
        self._ended: deque[LoggedCall] = deque(maxlen=MAX_ENDED)

    @contextmanager
    def follow(
        self, request_id: str, *, tenant: str, num_prompt_tokens: int, num_sequences: int
    ) -> Iterator[LoggedCall]:
        """A call from its start to its end, however it ends."""
        call = LoggedCall(request_id, tenant, num_prompt_tokens, num_sequences, started_s=time.time())
        self._running[id(call)] = call
        try:
            yield call
        except Exception as error:
            call.state = "failed"
            call.reason = (error.message if isinstance(error, PagodaError) else type(error).__name__)[:MAX_REASON_CHARS]
            raise
        finally:
            if call.state == "running":  # it ended by itself, was aborted, or its reader has gone
                is_whole = call.num_finished >= call.num_sequences and call.reason != "abort"
                call.state = "finished" if is_whole else "aborted"
            call.duration_s = time.time() - call.started_s
            del self._running[id(call)]
            self._ended.append(call)

    def running(self, tenant: str | None = None) -> list[LoggedCall]:
        """The running calls, the oldest first; tenant None: of every tenant."""
        return _of(self._running.values(), tenant)[:MAX_SHOWN]

    def ended(self, tenant: str | None = None) -> list[LoggedCall]:
        """The calls that ended last, the latest first."""
        return _of(reversed(self._ended), tenant)


def _of(calls: Iterable[LoggedCall], tenant: str | None) -> list[LoggedCall]:
    return [call for call in calls if tenant is None or call.tenant == tenant]
