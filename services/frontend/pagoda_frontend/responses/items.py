"""Input items of a response, for GET /v1/responses/{id}/input_items. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.conversation.drawn_ids import drawn_id
from pagoda_frontend.responses.protocol import ResponseItem

MAX_PAGE = 100
DEFAULT_PAGE = 20
"""OpenAI's."""
PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def input_items(
    given: str | Sequence[ResponseItem], *, stored_items: Callable[[], dict[str, dict[str, Any]]], id_seed: str
) -> list[dict[str, Any]]:
    """The items of a valid call, oldest first; items without an id get one.

    Args:
        stored_items: returns the items that may be referred to, by id.
        id_seed: seed of drawn ids.
    """
    if isinstance(given, str):
        given = [ResponseItem(role="user", content=given)]
    known: dict[str, dict[str, Any]] | None = None
    items = []
    for number, item in enumerate(given):
        is_reference = item.type == "item_reference" or (item.type is None and item.id is not None and not item.role)
        if is_reference:
            known = stored_items() if known is None else known
            items.append(known[item.id or ""])
            continue
        fields = item.model_dump(exclude_none=True)
        kind = fields.setdefault("type", "message")
        fields.setdefault("id", PREFIXES.get(kind, "item_") + drawn_id(id_seed, f"input {number}")[:32])
        fields.setdefault("status", "completed")
        if isinstance(fields.get("content"), str):
            part = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": part, "text": fields["content"]}]
        items.append(fields)
    return items


def item_page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of `items` (oldest first), in OpenAI's shape.

    Args:
        query: `limit`, `order` (asc or desc, the default) and `after`, the id of the item before the page.

    Raises:
        InvalidRequest: `field` names the parameter.
    """
    given = query.get("limit", str(DEFAULT_PAGE))
    limit = int(given) if given.isdecimal() and len(given) <= 9 else 0
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}, got {given[:100]!r}", field="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {order[:100]!r}", field="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after: there is no item {after[:100]!r}", field="after")
        start = places[0] + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }
