"""Hold: a group rests while it is wanted to, each time again."""

import asyncio

from pagoda_scheduler.groups.hold import Hold


async def rested(hold: Hold) -> None:
    """The group's side, once."""
    await hold.wait_wanted()
    await hold.rest()


async def turns(count: int = 5) -> None:
    """Let what can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_group_rests_from_the_wish_to_its_end() -> None:
    hold = Hold()
    group = asyncio.create_task(rested(hold))
    await turns()
    assert not group.done()
    hold.want("weights change")
    assert (hold.is_wanted, hold.reason) == (True, "weights change")
    await hold.wait_at_rest()
    await turns()
    assert not group.done(), "it rests until it is woken"
    hold.end()
    assert not hold.is_wanted
    await group


async def test_a_second_hold_is_as_good_as_the_first() -> None:
    hold = Hold()
    for reason in ("first", "second"):
        hold.want(reason)
        group = asyncio.create_task(rested(hold))
        await hold.wait_at_rest()
        await turns()
        assert not group.done(), reason
        hold.end()
        await group
        waiting = asyncio.create_task(hold.wait_at_rest())
        await turns()
        assert not waiting.done(), "it serves again"
        waiting.cancel()


async def test_a_group_whose_rest_is_cancelled_is_not_at_rest() -> None:
    hold = Hold()
    hold.want("")
    group = asyncio.create_task(rested(hold))
    await hold.wait_at_rest()
    group.cancel()
    await asyncio.wait([group])
    waiting = asyncio.create_task(hold.wait_at_rest())
    await turns()
    assert not waiting.done()
    waiting.cancel()
