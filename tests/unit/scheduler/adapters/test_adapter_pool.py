"""AdapterPool: who may run, what is read and what goes, adapter by adapter."""

import pytest

from pagoda_common.errors import ModelLoadError, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.adapters import adapter_pool
from pagoda_scheduler.adapters.adapter_pool import AdapterPool
from pagoda_scheduler.core.request import Request
from tests.unit.scheduler.stories import make_request


def lora(name: str, *, is_pinned: bool = False) -> LoraAdapter:
    return LoraAdapter(name=name, is_pinned=is_pinned)


def request(name: str | None) -> Request:
    return make_request(str(name), 4, lora=None if name is None else lora(name))


def loads(pool: AdapterPool) -> list[tuple[int, str]]:
    """What is to be read is read."""
    found = pool.take_loads()
    for _, adapter in found:
        pool.loaded(adapter)
    return [(number, adapter.name) for number, adapter in found]


def test_numbers_begin_with_1_and_are_never_given_twice() -> None:
    pool = AdapterPool(max_loras=1, max_cpu_loras=1)
    pool.begin([])
    assert not pool.can_run(request("a"))
    assert loads(pool) == [(1, "a")]
    assert pool.take_loads() == []
    assert (pool.can_run(request("a")), pool.number_of(request("a")), pool.number_of(request(None))) == (True, 1, 0)
    pool.begin([])
    assert not pool.can_run(request("b"))
    assert (loads(pool), pool.take_removals(), pool.take_removals()) == ([(2, "b")], [1], [])
    pool.begin([])
    assert not pool.can_run(request("a"))
    assert loads(pool) == [(3, "a")]


def test_no_more_adapters_run_than_may_and_one_that_runs_counts_once() -> None:
    pool = AdapterPool(max_loras=2, max_cpu_loras=4)
    for name in "abc":
        pool.load(lora(name))
    assert loads(pool) == [(1, "a"), (2, "b"), (3, "c")]
    pool.begin([request("a"), request("a"), request(None)])
    assert pool.can_run(request("b"))
    pool.admit(request("b"))
    assert (pool.can_run(request("b")), pool.can_run(request("a")), pool.can_run(request(None))) == (True, True, True)
    assert not pool.can_run(request("c"))
    assert pool.can_run(request("c"), is_alone=True)
    assert not pool.is_impatient


def test_after_so_many_have_passed_no_more_do() -> None:
    assert adapter_pool.PATIENCE == 64
    pool = AdapterPool(max_loras=1, max_cpu_loras=2)
    for name in "ab":
        pool.load(lora(name))
    loads(pool)
    pool.begin([request("a")])
    assert not pool.can_run(request("b"))
    for _ in range(63):
        pool.admit(request("a"))
    assert not pool.is_impatient
    pool.admit(request("a"))
    assert pool.is_impatient
    pool.begin([request("a")])
    assert not pool.is_impatient, "no one waits for a place yet"
    assert not pool.can_run(request("b"))
    assert pool.is_impatient
    pool.begin([])
    pool.admit(request("b"))
    pool.can_run(request("a"))
    assert not pool.is_impatient, "it has had its turn"


def test_what_runs_is_asked_for_or_pinned_stays() -> None:
    pool = AdapterPool(max_loras=3, max_cpu_loras=3)
    for name in "abc":
        pool.load(lora(name))
    loads(pool)
    pool.begin([request("a")])
    pool.pin(lora("b"), is_pinned=True)
    assert pool.can_run(request("c"))
    assert not pool.can_run(request("d"))
    assert (pool.take_loads(), pool.take_removals()) == ([], []), "there is no room for it"
    pool.begin([request("a")])
    assert not pool.can_run(request("d"))
    assert (loads(pool), pool.take_removals()) == ([(4, "d")], [3])
    pool.pin(lora("b"), is_pinned=False)
    pool.begin([request("a")])
    assert not pool.can_run(request("e"))
    assert (loads(pool), pool.take_removals()) == ([(5, "e")], [2])


def test_the_least_recently_asked_for_goes_first_and_one_that_is_listed_no_more_before_it() -> None:
    pool = AdapterPool(max_loras=3, max_cpu_loras=3)
    for name in "abc":
        pool.load(lora(name))
    loads(pool)
    pool.begin([])
    assert pool.can_run(request("a"))
    pool.begin([])
    pool.load(lora("d"))
    assert pool.take_removals() == [2]
    loads(pool)
    pool.pin(lora("d"), is_pinned=True)
    pool.forget(lora("d"))
    pool.forget(lora("unknown"))
    pool.load(lora("e"))
    assert pool.take_removals() == [4]
    loads(pool)
    assert [pool.is_loaded(lora(name)) for name in "abcde"] == [True, False, True, False, True]


def test_an_adapter_that_is_pinned_when_it_comes_stays() -> None:
    pool = AdapterPool(max_loras=1, max_cpu_loras=1)
    pool.load(lora("a", is_pinned=True))
    assert not pool.is_loaded(lora("a"))
    loads(pool)
    pool.begin([])
    pool.load(lora("b"))
    assert (pool.take_loads(), pool.take_removals()) == ([], [])


def test_an_adapter_that_cannot_be_read_fails_those_who_wait_for_it_alone() -> None:
    pool = AdapterPool(max_loras=1, max_cpu_loras=1)
    pool.pin(lora("a"), is_pinned=True)
    pool.take_loads()
    waiting, error = [request("a"), request("b"), request(None)], ModelLoadError("no file")
    assert pool.failed(lora("a"), waiting, error) == waiting[:1]
    assert [(one.finish_reason, one.error) for one in waiting] == [("error", error), (None, None), (None, None)]
    pool.loaded(lora("a"))
    assert not pool.is_loaded(lora("a")), "it is gone"
    pool.begin([])
    pool.load(lora("b"))
    assert loads(pool) == [(2, "b")], "it is pinned no more"


@pytest.mark.parametrize("again", [True, False])
def test_what_is_there_is_not_read_again(again: bool) -> None:
    pool = AdapterPool(max_loras=1, max_cpu_loras=2)
    pool.load(lora("a"))
    if again:
        loads(pool)
    pool.load(lora("a"))
    pool.pin(lora("a"), is_pinned=True)
    assert [number for number, _ in pool.take_loads()] == ([] if again else [1])


def test_a_pinned_adapter_that_cannot_be_read_is_pinned_no_more() -> None:
    pool = AdapterPool(max_loras=1, max_cpu_loras=1)
    pool.load(lora("a", is_pinned=True))
    loads(pool)
    pool.failed(lora("a"), (), PagodaError("no such file"))
    pool.load(lora("a"))
    loads(pool)
    pool.begin([])
    assert not pool.can_run(request("b"))
    assert [name for _, name in loads(pool)] == ["b"], "the other one gave its place"
