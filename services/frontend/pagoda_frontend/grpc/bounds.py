"""Bounds on the lists of a message, checked before anything is built from it."""

from google.protobuf.message import Message

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.budget.fields import BOUNDS, MAX_PARTS
from pagoda_frontend.budget.json_scan import MAX_VALUES, scan

MAX_MESSAGE_BYTES = 4 * 1024**2
"""Maximum size of a request, gRPC's default; a longer one is refused as soon as its length is known."""
LISTS = {
    **{name: bound.max_items for name, bound in BOUNDS.items() if bound.max_items},
    "inputs": 2048,
    "request_ids": 4096,
    "bad_words_token_ids": 128,
    "choice": 10_000,
    "texts": 10_000,
    "tool_calls": MAX_PARTS,
    "token_ids": MAX_VALUES,
    "ids": MAX_VALUES,
    "received": 16_384,
}
"""Maximum number of entries, by the name of the list."""
JSON_SUFFIX = "_json"


def check_message(message: Message) -> None:
    """Check the lists and JSON texts of a message, and of messages within it, against their bounds.

    Raises:
        InvalidRequest: one is too long; `field` names it.
    """
    left = [message]
    num_messages = 0
    while left:
        one = left.pop()
        num_messages += 1
        if num_messages > MAX_PARTS * 2:
            raise InvalidRequest(f"the request has more than {MAX_PARTS * 2} messages in it")
        for field, value in one.ListFields():
            kind = field.message_type
            if field.is_repeated:
                bound = LISTS.get(field.name, MAX_PARTS)
                if len(value) > bound:
                    text = f"{field.name} must have at most {bound} entries, got {len(value)}"
                    raise InvalidRequest(text, field=field.name)
                if kind is not None and not kind.GetOptions().map_entry:
                    left.extend(value)
            elif kind is not None:
                left.append(value)
            elif field.name.endswith(JSON_SUFFIX):
                scan(value)
