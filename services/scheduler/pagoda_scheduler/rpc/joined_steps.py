"""Several steps' news for one frontend as one message. Knows the message; no window and no connection."""

from pagoda.v1 import scheduler_pb2

MAX_JOINED_BYTES = 64 * 1024
"""A message that has grown beyond this takes no more: each addition copies it."""
_JOINED = {"session_epoch", "step", "slots", "offsets", "token_ids", "admitted", "finished", "load"}
"""Fields of messages that may be joined; a message with any other goes alone."""


def join_steps(first: scheduler_pb2.SchedulerMessage, second: scheduler_pb2.SchedulerMessage) -> bool:
    """Add `second`, which follows `first`, to it; False where they must stay apart.

    A slot then stands several times in the columns, its tokens in order: as where a step gives a sequence several. No
    slot that ends in `first` can begin again in `second`: its frontend does not know of the end yet.
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
