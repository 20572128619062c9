"""Who the work that is done now is done for, and what of the request's memory is held until it is admitted."""

from contextvars import ContextVar

from pagoda_frontend.budget.held_memory import Hold

caller: ContextVar[str] = ContextVar("caller", default="")
"""The key that was accepted, else the address that a call comes from: what a caller says of itself does not count."""
current_hold: ContextVar[Hold | None] = ContextVar("current_hold", default=None)
"""Of the call that is being answered."""


def release_hold() -> None:
    """The request is admitted: from here on the engine's bounds count."""
    hold = current_hold.get()
    if hold is not None:
        hold.release()


def held_bytes() -> int:
    """Size of the request that is being answered, 0 where it was not counted."""
    hold = current_hold.get()
    return 0 if hold is None else hold.num_bytes_seen
