"""Stories of requests that find their worker group."""

from types import SimpleNamespace
from typing import Any

from pagoda_scheduler.engine.router import ROUTERS
from pagoda_scheduler.kv.cache_group import CacheGroup
from tests.unit.scheduler.stories import PretendWorker, make_request, make_scheduler, run


def make_groups(count: int) -> list[Any]:
    """Groups of which a router sees the scheduler alone."""
    return [SimpleNamespace(scheduler=make_scheduler()) for _ in range(count)]


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    groups, router = make_groups(2), ROUTERS["prefix"]()
    groups[1].scheduler.add(make_request("a", 40))
    run(groups[1].scheduler, PretendWorker())
    assert router.choose(make_request("b", 40), groups) is groups[1]


def test_a_burst_with_one_prefix_stays_together_before_anything_is_computed() -> None:
    groups, router = make_groups(2), ROUTERS["prefix"]()
    first = router.choose(make_request("a", 40), groups)
    assert router.choose(make_request("b", 40), groups) is first


def test_recurrent_layers_alone_have_prefixes_too() -> None:
    layers = (CacheGroup("recurrent"),)
    groups: list[Any] = [
        SimpleNamespace(scheduler=make_scheduler(groups=layers, num_snapshots=4, num_blocks=0)) for _ in range(2)
    ]
    groups[1].scheduler.add(make_request("a", 40))
    run(groups[1].scheduler, PretendWorker(groups=layers))
    assert ROUTERS["prefix"]().choose(make_request("b", 40), groups) is groups[1]


def test_load_outweighs_a_short_prefix() -> None:
    groups, router = make_groups(2), ROUTERS["prefix"]()
    first = router.choose(make_request("a", 8), groups)
    first.scheduler.add(make_request("b", 100))
    assert router.choose(make_request("c", 8), groups) is not first


def test_what_was_sent_to_a_lost_group_is_forgotten() -> None:
    groups, router = make_groups(3), ROUTERS["prefix"]()
    lost = router.choose(make_request("a", 40), groups)
    router.forget(lost)
    others = [group for group in groups if group is not lost]
    assert router.choose(make_request("b", 40), [*others, lost]) is others[0]


def test_round_robin_takes_each_group_in_turn() -> None:
    groups, router = make_groups(2), ROUTERS["round_robin"]()
    chosen = [router.choose(make_request(str(number), 40), groups) for number in range(4)]
    assert chosen == [groups[0], groups[1], groups[0], groups[1]]
