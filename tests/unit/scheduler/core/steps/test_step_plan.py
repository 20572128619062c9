"""StepPlan: the room that a step has left, and the step that comes of it."""

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step_plan import StepPlan
from pagoda_scheduler.kv.transfers import Transfers
from tests.unit.scheduler.stories import make_request


def in_slot(name: str, slot: int) -> Request:
    request = make_request(name, 4)
    request.slot = slot
    return request


def plan_of(**options: int) -> StepPlan:
    return StepPlan(budget=20, **options)


def test_a_sequence_that_is_dropped_gives_all_its_room_back() -> None:
    plan, stays, goes = plan_of(), make_request("stays", 4), make_request("goes", 4)
    plan.add(stays, 5, num_ahead=1, blocks=[7])
    plan.add(goes, 3, num_ahead=4, blocks=[8, 9])
    assert plan.budget == 20 - 6 - 7
    plan.drop(goes)
    assert plan.budget == 20 - 6
    plan.drop(goes)
    assert plan.budget == 20 - 6, "it is not in the step any more"
    assert (plan.scheduled, plan.ahead, plan.appended) == ({stays: 5}, {stays: 1}, {stays: [7]})


def test_a_step_lists_sequences_in_order_with_what_is_new_of_each() -> None:
    plan = plan_of()
    first, second, third = (in_slot(name, slot) for name, slot in (("a", 5), ("b", 2), ("c", 9)))
    plan.add(first, 1, num_ahead=2)
    plan.add(second, 3, blocks=[30, 31])
    plan.admit(third, 4, num_cached_tokens=1)
    output = plan.output(step=7, freed_slots=[1], transfers=Transfers(swap_out={40: 3}, swap_in=[(41, 4)], copy={6: 5}))
    assert (output.step, output.freed_slots, output.num_tokens) == (7, [1], 8)
    assert (output.slots, output.num_scheduled_tokens) == ([5, 2, 9], [1, 3, 4])
    assert output.num_lookahead_tokens == [2, 0, 0]
    assert (output.appended_slots, output.appended_block_ids) == ([2, 2], [30, 31])
    assert output.blocks_to_swap_out == [(3, 40)], "from the device to the host"
    assert (output.blocks_to_swap_in, output.blocks_to_copy) == ([(41, 4)], [(5, 6)])
    (new,) = output.new_requests
    assert (new.slot, new.request_id, new.num_computed_tokens) == (9, "c/0", 1)
    assert plan.budget == 20 - 3 - 3 - 4


def test_a_step_without_drafts_or_blocks_says_nothing_of_them() -> None:
    plan = plan_of()
    plan.add(in_slot("a", 0), 4)
    output = plan.output(step=1, freed_slots=[], transfers=Transfers())
    assert output.num_lookahead_tokens is None
    assert (output.appended_slots, output.appended_block_ids, output.appended_groups) == ([], [], ())


def test_blocks_of_several_tables_are_told_with_their_table() -> None:
    plan = plan_of(num_tables=2)
    plan.add(in_slot("a", 3), 4, blocks=[10, 11, 20, 21])
    plan.add(in_slot("b", 4), 4, blocks=[12, 22])
    output = plan.output(step=1, freed_slots=[], transfers=Transfers())
    assert output.appended_slots == [3, 3, 3, 3, 4, 4]
    assert output.appended_block_ids == [10, 11, 20, 21, 12, 22]
    assert output.appended_groups == [0, 0, 1, 1, 0, 1]
