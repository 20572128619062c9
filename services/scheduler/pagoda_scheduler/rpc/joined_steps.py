"""Joins several steps' messages for one frontend into one. Knows the message; no window and no connection."""

from pagoda.v1 import scheduler_pb2

MAX_JOINED_BYTES = 64 * 1024
"""Bytes above which nothing is added to a message, because each addition copies it."""
_JOINED = {"session_epoch", "step", "slots", "offsets", "token_ids", "admitted", "finished", "load"}
"""Fields of messages that may be joined; a message with any other field is sent alone."""


def join_steps(first: scheduler_pb2.SchedulerMessage, second: scheduler_pb2.SchedulerMessage) -> bool:
    """Add `second` to `first`, which precedes it; False if they cannot be joined.

    A slot then occurs several times in the columns, its tokens in order, as in a step that gives a sequence several
    tokens. A slot that ends in `first` cannot be reused in `second`, because its frontend does not know of the end yet.
    """
    if first.ByteSize() > MAX_JOINED_BYTES or not (_is_plain(first) and _is_plain(second)):
        return False
    first.step = second.step or first.step
    if second.slots:
        first.slots += second.slots
        first.offsets += second.offsets
        first.token_ids += second.token_ids
    first.admitted.extend(second.admitted)
    first.finished.extend(second.finished)
    if second.HasField("load"):
        first.load.CopyFrom(second.load)
    return True


def _is_plain(message: scheduler_pb2.SchedulerMessage) -> bool:
    return all(field.name in _JOINED for field, _ in message.ListFields())
