"""Pages of input items: limits, order, where a page begins and whether there is more."""

from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.responses.items import item_page

ITEMS = [{"id": f"i{number}"} for number in range(25)]


def ids(page: dict[str, Any]) -> list[str]:
    return [item["id"] for item in page["data"]]


def test_a_page_has_the_newest_twenty_first_unless_told_otherwise() -> None:
    page = item_page(ITEMS, {})
    assert ids(page) == [f"i{number}" for number in range(24, 4, -1)]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", "i24", "i5", True)
    oldest = item_page(ITEMS, {"order": "asc", "limit": "2"})
    assert (ids(oldest), oldest["has_more"]) == (["i0", "i1"], True)


def test_a_page_begins_after_the_item_that_is_named() -> None:
    page = item_page(ITEMS, {"order": "asc", "after": "i22", "limit": "2"})
    assert (ids(page), page["has_more"]) == (["i23", "i24"], False)
    page = item_page(ITEMS, {"after": "i3", "limit": "2"})
    assert (ids(page), page["has_more"]) == (["i2", "i1"], True)
    page = item_page(ITEMS, {"order": "asc", "after": "i24"})
    assert (ids(page), page["first_id"], page["last_id"], page["has_more"]) == ([], None, None, False)
    assert item_page([], {})["has_more"] is False


@pytest.mark.parametrize(
    ("limit", "is_good"), [("1", True), ("100", True), ("0", False), ("101", False), ("-1", False)]
)
def test_a_limit_takes_its_bounds(limit: str, is_good: bool) -> None:
    if is_good:
        assert len(ids(item_page(ITEMS, {"limit": limit}))) == min(int(limit), 25)
        return
    with pytest.raises(InvalidRequest) as caught:
        item_page(ITEMS, {"limit": limit})
    assert caught.value.field == "limit"


@pytest.mark.parametrize(("name", "value"), [("limit", "many"), ("limit", ""), ("order", "up"), ("after", "nobody")])
def test_what_makes_no_sense_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        item_page(ITEMS, {name: value})
    assert caught.value.field == name
