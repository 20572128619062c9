"""Which model a request is for, and when a frontend of several is ready: without engines and without HTTP."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.errors import InvalidRequest, NotFound, NotReady, PagodaError
from pagoda_frontend.serving.models import Models


class Engine:
    """Returns the answers that the test gives it."""

    def __init__(self) -> None:
        self.loras: dict[str, Any] = {}
        self.found: dict[str, Any] = {}
        self.asked: list[str] = []
        self.held: set[str] = set()
        self.fault: PagodaError | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def resolve_lora(self, name: str) -> Any:
        self.asked.append(name)
        if self.fault is not None:
            raise self.fault
        return self.found.get(name)

    async def adopt(self, key: str) -> list[Any]:
        await self.answers.wait()
        if self.fault is not None:
            raise self.fault
        if key not in self.held:
            raise NotFound("unknown")
        return [key]


def model(*names: str, **state: Any) -> Any:
    known = {"has_been_ready": True, "is_ready": True, "is_draining": False, "not_ready_reason": "", "is_idle": True}
    known |= {"num_open": 1, "num_calls": 2, "num_requests": 3}
    return SimpleNamespace(config=SimpleNamespace(served_model_name=names), engine=Engine(), **{**known, **state})


def models(*servings: Any) -> Models:
    return Models(cast("Any", servings))


async def test_one_model_takes_every_request() -> None:
    one = model("a")
    for name in ("a", "b", "", None, 5):
        assert await models(one).named(name) is one
    assert await models(one).holding("key") is one
    assert one.engine.asked == []


async def test_names_aliases_and_adapters_lead_to_their_model() -> None:
    one, two = model("a"), model("b", "c")
    two.engine.loras["d"] = object()
    two.engine.found["e"] = object()
    both = models(one, two)
    for name, expected in (("a", one), ("b", two), ("c", two), ("d", two), ("e", two), (5, one)):
        assert await both.named(name) is expected
    assert (one.engine.asked, two.engine.asked) == (["e"], ["e"])
    assert (both.names, both.known(["a"])) == (["a", "b"], None)


@pytest.mark.parametrize("name", [None, ""])
async def test_a_request_without_a_name_is_told_the_names(name: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await models(model("a"), model("b")).named(name)
    assert (caught.value.message, caught.value.field) == ("model must be one of a, b", "model")


async def test_an_unknown_name() -> None:
    one, two = model("a"), model("b")
    both = models(one, two)
    with pytest.raises(NotFound, match="The model `x` does not exist") as caught:
        await both.named("x")
    assert caught.value.field == "model"
    with pytest.raises(NotFound):
        await both.named("x" * 10_000)
    assert one.engine.asked == ["x"], "no name is so long"
    two.has_been_ready, two.not_ready_reason = False, "why"
    with pytest.raises(NotReady, match="the model 'x' is not known yet: b: why"):
        await both.named("x")
    two.has_been_ready, one.is_draining, one.not_ready_reason = True, True, "going"
    with pytest.raises(NotReady, match="going"):
        await both.named("x")


async def test_a_scheduler_that_cannot_tell_stands_in_no_ones_way() -> None:
    one, two = model("a"), model("b")
    one.engine.fault = NotReady("away")
    two.engine.found["e"] = object()
    assert await models(one, two).named("e") is two
    with pytest.raises(NotReady, match="away"):
        await models(one, two).named("x")


async def test_the_model_that_holds_a_stream() -> None:
    one, two = model("a"), model("b")
    both = models(one, two)
    assert await both.holding("k") is one, "which says that there is none"
    two.engine.held.add("k")
    assert await both.holding("k") is two
    one.engine.answers.clear()  # it hangs
    assert await both.holding("k") is two
    one.engine.answers.set()
    one.engine.fault = NotReady("away")
    assert await both.holding("k") is two
    with pytest.raises(NotReady, match="away"):
        await both.holding("other")


def test_readiness_of_several() -> None:
    one, two = model("a"), model("b")
    both = models(one, two)
    assert (both.has_been_ready, both.is_ready, both.not_ready_reason) == (True, True, "")
    two.is_ready, two.not_ready_reason = False, "lost"
    assert (both.is_ready, both.not_ready_reason) == (True, "")
    one.is_ready, one.not_ready_reason = False, "gone"
    assert (both.is_ready, both.not_ready_reason) == (False, "a: gone; b: lost")
    one.is_ready, two.has_been_ready = True, False
    assert (both.has_been_ready, both.is_ready, both.not_ready_reason) == (False, False, "b: lost")
    both.is_draining = True
    assert (one.is_draining, two.is_draining, both.not_ready_reason) == (True, True, "gone")


async def test_counts_are_sums() -> None:
    one, two = model("a"), model("b", is_idle=False)
    both = models(one, two)
    assert (both.num_open, both.num_calls, both.num_requests, both.is_idle) == (2, 4, 6, False)

    async def wait() -> None:
        two.is_idle = True

    one.wait_until_idle = two.wait_until_idle = wait
    await both.wait_until_idle()
    assert both.is_idle


def test_a_name_without_asking_a_scheduler() -> None:
    one, two = model("a"), model("b")
    two.engine.loras["d"] = object()
    both = models(one, two)
    assert (both.named_here("b"), both.named_here("d")) == (two, two)
    assert models(one).named_here(None) is one
    with pytest.raises(NotFound):
        both.named_here("x")
    for name in (None, ""):
        with pytest.raises(InvalidRequest, match="model must be one of a, b"):
            both.named_here(name)
    one.engine.loras["d"] = object()
    with pytest.raises(InvalidRequest, match="model is 'd', an adapter of a and b: unload one of them"):
        both.named_here("d")
    assert one.engine.asked == two.engine.asked == []
