"""Stories of requests that find their worker group."""

from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_scheduler.engine import router
from pagoda_scheduler.engine.router import ROUTERS
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheGroup
from tests.unit.scheduler.stories import PretendWorker, make_request, make_scheduler, run


def make_groups(count: int) -> list[Any]:
    """Groups of which a router sees the scheduler alone."""
    return [SimpleNamespace(scheduler=make_scheduler()) for _ in range(count)]


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    groups, routes = make_groups(2), ROUTERS["prefix"]()
    groups[1].scheduler.add(make_request("a", 40))
    run(groups[1].scheduler, PretendWorker())
    assert routes.choose(make_request("b", 40), groups) is groups[1]


def test_a_burst_with_one_prefix_stays_together_before_anything_is_computed() -> None:
    groups, routes = make_groups(2), ROUTERS["prefix"]()
    first = routes.choose(make_request("a", 40), groups)
    assert routes.choose(make_request("b", 40), groups) is first


def test_recurrent_layers_alone_have_prefixes_too() -> None:
    layers = (CacheGroup("recurrent"),)
    groups: list[Any] = [
        SimpleNamespace(scheduler=make_scheduler(groups=layers, num_snapshots=4, num_blocks=0)) for _ in range(2)
    ]
    groups[1].scheduler.add(make_request("a", 40))
    run(groups[1].scheduler, PretendWorker(groups=layers))
    assert ROUTERS["prefix"]().choose(make_request("b", 40), groups) is groups[1]


@pytest.mark.parametrize("layers", [ONE_GROUP, (CacheGroup("recurrent"),)])
@pytest.mark.parametrize("num_blocks", [1, 2, 9])
def test_a_prefix_of_any_length_counts(layers: tuple[CacheGroup, ...], num_blocks: int) -> None:
    groups: list[Any] = [SimpleNamespace(scheduler=make_scheduler(groups=layers, num_snapshots=4)) for _ in range(2)]
    routes = ROUTERS["prefix"]()
    first = routes.choose(make_request("a", 4 * num_blocks + 1), groups)
    assert routes.choose(make_request("b", 4 * num_blocks + 1), [groups[1], groups[0]]) is first
    shares_one = [*range(1000, 1004), *range(4 * num_blocks)]
    assert routes.choose(make_request("c", shares_one), [groups[1], groups[0]]) is first


def test_load_outweighs_a_short_prefix() -> None:
    groups, routes = make_groups(2), ROUTERS["prefix"]()
    first = routes.choose(make_request("a", 8), groups)
    first.scheduler.add(make_request("b", 100))
    assert routes.choose(make_request("c", 8), groups) is not first


def test_what_was_sent_to_a_lost_group_is_forgotten() -> None:
    groups, routes = make_groups(3), ROUTERS["prefix"]()
    lost = routes.choose(make_request("a", 40), groups)
    routes.forget(lost)
    others = [group for group in groups if group is not lost]
    assert routes.choose(make_request("b", 40), [*others, lost]) is others[0]


def test_round_robin_takes_each_group_in_turn() -> None:
    groups, routes = make_groups(2), ROUTERS["round_robin"]()
    chosen = [routes.choose(make_request(str(number), 40), groups) for number in range(4)]
    assert chosen == [groups[0], groups[1], groups[0], groups[1]]


def test_of_what_was_sent_the_longest_unused_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MAX_MEMORY", 2)
    groups, chosen = make_groups(2), ROUTERS["prefix"]()

    def sent_to(salt: str) -> Any:
        """Where a request whose prefix is one block goes; without that, to the first."""
        return chosen.choose(make_request(salt, 5, cache_salt=salt), groups)

    groups[0].scheduler.add(make_request("busy", 50))
    assert sent_to("a") is groups[1]
    assert sent_to("b") is groups[1]
    groups[0].scheduler.take_all()
    assert sent_to("a") is groups[1]  # used again: later than b
    assert sent_to("c") is groups[0]
    assert sent_to("a") is groups[1], "remembered"
    assert sent_to("b") is groups[0], "forgotten"
