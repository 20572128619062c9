"""Steps in flight, result by result: what a sequence gets, what is counted, and who is blamed for a loss."""

from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_common.errors import Code, PagodaError
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.core import step_plan
from pagoda_scheduler.core.constraint_holds import LARGE, ConstraintHolds, HoldStatus
from pagoda_scheduler.core.in_flight import OUTPUT_TOKEN_COST, InFlight
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.step import BadSlot, ModelRunnerOutput, PromptLogprobRows, SchedulerOutput, StepTimings
from pagoda_scheduler.core.step_plan import StepPlan
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.kv.transfers import Transfers
from tests.unit.scheduler.stories import make_request


class Side:
    """Records what the result of a step changes."""

    def __init__(self, *, charges: bool = False, cheaper: bool | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_swap_cheaper = True
        self.block_size = 4
        self.cheaper = cheaper
        self.flights = InFlight(
            kv=self,  # type: ignore[arg-type]  # a recorder
            beams=self,  # type: ignore[arg-type]  # a recorder
            speculation=SimpleNamespace(count=lambda *args: self.calls.append(("count", *args))),  # type: ignore[arg-type]  # so does this
            finish=self.finish,
            took=lambda num_tokens, compute_ns: self.calls.append(("took", num_tokens, compute_ns)),
            charge=(lambda request, cost: self.calls.append(("charge", request.request_id, cost))) if charges else None,
            swap_cost=self,  # type: ignore[arg-type]  # a recorder
        )

    def finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        self.calls.append(("finish", request.request_id))

    def cache_computed(self, request: Request, num_tokens: int) -> None:
        self.calls.append(("cache", request.request_id, num_tokens))

    def forget(self, request: Request) -> None:
        self.calls.append(("forget", request.request_id))

    def advance(self, request: Request, token_id: int, row: int, logprobs: object, result: object) -> None:
        self.calls.append(("beam", request.request_id, token_id, row))

    def add(self, *, forward_ns: int, num_tokens: int) -> bool | None:
        self.calls.append(("cost", forward_ns, num_tokens))
        return self.cheaper

    def step(
        self,
        requests: list[Request],
        tokens: list[int],
        *,
        samples: list[bool] | None = None,
        lookahead: list[int] | None = None,
        number: int = 3,
        **output: Any,
    ) -> StepResult:
        self.send(requests, samples=samples, lookahead=lookahead)
        result = StepResult(number)
        counts = output.pop("num_sampled_tokens", None)
        self.flights.take(ModelRunnerOutput(number, counts, tokens, **output), result)
        return result

    def send(
        self, requests: list[Request], *, samples: list[bool] | None = None, lookahead: list[int] | None = None
    ) -> None:
        slots = [request.slot for request in requests]
        output = SchedulerOutput(3, [], [], slots, [1] * len(slots), [], [], 10, num_lookahead_tokens=lookahead)
        self.flights.add(output, requests, samples or [True] * len(requests))


def running(name: str, num_prompt: int = 5, *, slot: int = 0, pending: int = 1, **more: Any) -> Request:
    request = make_request(name, num_prompt, **more)
    request.status, request.slot, request.is_announced = RequestStatus.RUNNING, slot, True
    request.num_tokens += pending
    request.num_pending = pending
    return request


def test_an_output_token_costs_two() -> None:
    assert OUTPUT_TOKEN_COST == 2


def test_every_sequence_gets_its_token() -> None:
    side, a, b = Side(), running("a", slot=4), running("b", slot=2)
    a.num_crashes = 1
    b.is_announced = False
    result = side.step([a, b], [70, 80])
    assert (a.output_token_ids, a.num_pending, a.num_tokens, a.num_crashes) == ([70], 0, 6, 0)
    assert (b.output_token_ids, b.is_announced) == ([80], True)
    assert (result.requests, result.offsets, result.token_ids, result.rows) == ([a, b], [0, 0], [70, 80], [0, 1])
    assert (result.admitted, result.finished) == ([b], [])
    assert (side.calls, len(side.flights)) == ([], 0)


def test_one_that_has_ended_gets_no_more() -> None:
    side, a, b = Side(), running("a"), running("b", slot=1)
    a.status = RequestStatus.FINISHED
    result = side.step([a, b], [70, 80])
    assert a.output_token_ids == []
    assert (result.requests, result.token_ids, result.rows) == ([b], [80], [1])


@pytest.mark.parametrize(("num_prompt", "cached"), [(3, []), (4, [4]), (5, []), (7, []), (8, [8])])
def test_a_block_is_found_when_the_token_after_it_is_known(num_prompt: int, cached: list[int]) -> None:
    side = Side()
    side.step([running("a", num_prompt)], [70])
    assert side.calls == [("cache", "a", number) for number in cached]


@pytest.mark.parametrize(("max_tokens", "token", "reason"), [(1, 70, "length"), (2, 70, None), (2, 9, "stop")])
def test_a_sequence_ends_by_its_length_or_an_end_token(max_tokens: int, token: int, reason: str | None) -> None:
    side, request = Side(), running("a", max_tokens=max_tokens, stop_token_ids=[9])
    result = side.step([request], [token])
    assert request.finish_reason == reason
    assert result.finished == ([] if reason is None else [request])
    assert side.calls == ([] if reason is None else [("finish", "a")])
    assert result.token_ids == [token]


def test_every_token_is_charged_to_its_tenant() -> None:
    side = Side(charges=True)
    side.step([running("a"), running("b", slot=1)], [70, 80])
    assert side.calls == [("charge", "a", 2), ("charge", "b", 2)]


def test_a_beam_s_candidates_are_the_searchs() -> None:
    side, beam, other = Side(), running("beam"), running("other", slot=1)
    beam.is_beam = True
    result = side.step([beam, other], [70, 80])
    assert side.calls == [("beam", "beam", 70, 0)]
    assert (result.requests, result.rows) == ([other], [1])


def test_parts_of_prompts_and_drafts_are_counted_by_row() -> None:
    side = Side()
    a, b, c = running("a", pending=0), running("b", slot=1, max_tokens=9), running("c", slot=2)
    b.num_lookahead = 2
    result = side.step(
        [a, b, c],
        [70, 71, 80],
        samples=[False, True, True],
        lookahead=[0, 2, 0],
        num_sampled_tokens=[0, 2, 1],
        num_draft_tokens=[0, 2, 0],
    )
    assert (a.output_token_ids, b.output_token_ids, c.output_token_ids) == ([], [70, 71], [80])
    assert (result.requests, result.offsets, result.rows) == ([b, b, c], [0, 1, 0], [0, 1, 2])
    assert ("count", [0, 2, 0], [0, 2, 1]) in side.calls
    assert (b.num_lookahead, b.num_tokens, b.num_pending) == (0, 7, 0)


@pytest.mark.parametrize(
    ("count", "ahead", "wanted"), [(0, 0, "1"), (2, 0, "1"), (0, 2, "1 to 3"), (4, 2, "1 to 3"), (3, 2, None)]
)
def test_as_many_tokens_as_could_be_are_taken(count: int, ahead: int, wanted: str | None) -> None:
    side, request = Side(), running("a", max_tokens=20)
    request.num_lookahead = ahead
    tokens = list(range(70, 70 + count))
    if wanted is None:
        side.step([request], tokens, lookahead=[ahead], num_sampled_tokens=[count])
        assert request.output_token_ids == tokens
        return
    with pytest.raises(PagodaError) as error:
        side.step([request], tokens, lookahead=[ahead], num_sampled_tokens=[count])
    assert str(error.value) == f"step 3: {request!r} got {count} tokens, expected {wanted}"
    assert len(side.flights) == 1, "what fails is held against its sequences"


def test_nothing_comes_after_an_end() -> None:
    side, a, b = Side(), running("a", max_tokens=9, stop_token_ids=[9]), running("b", slot=1)
    a.num_lookahead = 2
    result = side.step([a, b], [70, 9, 71, 80], lookahead=[2, 0], num_sampled_tokens=[3, 1])
    assert a.output_token_ids == [70, 9]
    assert (result.token_ids, result.rows) == ([70, 9, 80], [0, 1, 3])


def test_a_bad_slot_is_one_sequences_error() -> None:
    side, a, b = Side(), running("a"), running("b", slot=1)
    bad = BadSlot(0, int(Code.INVALID_ARGUMENT), "no token left", "logit_bias")
    result = side.step([a, b], [80], num_sampled_tokens=[0, 1], bad_slots=[bad])
    assert (a.finish_reason, a.is_finished) == ("error", True)
    assert a.error is not None
    assert (str(a.error), a.error.field, a.error.code) == ("no token left", "logit_bias", Code.INVALID_ARGUMENT)
    assert (result.finished, result.requests, result.rows) == ([a], [b], [0])
    assert side.calls == [("forget", "a"), ("finish", "a")]


def test_a_bad_slot_without_a_field_has_none() -> None:
    side, a = Side(), running("a")
    side.step([a], [], num_sampled_tokens=[0], bad_slots=[BadSlot(0, int(Code.INTERNAL), "no")])
    assert a.error is not None
    assert a.error.field is None


@pytest.mark.parametrize("samples", [True, False])
def test_an_embedding_ends_its_sequence(samples: bool) -> None:
    side, a = Side(), running("a", slot=6, max_tokens=1, pooling=PoolingParams(task="embed"))
    a.is_announced = False
    result = side.step([a], [], samples=[samples], num_sampled_tokens=[0], pooled={6: b"abcd"})
    if not samples:
        assert (a.finish_reason, result.finished, a.num_pending) == (None, [], 1)
        return
    assert (a.embedding, a.finish_reason, a.num_pending, a.num_tokens) == (b"abcd", "stop", 0, 5)
    assert (result.admitted, result.finished, side.calls) == ([a], [a], [("finish", "a")])


def test_an_embedding_that_did_not_come_is_an_error() -> None:
    side, a = Side(), running("a", slot=6, max_tokens=1, pooling=PoolingParams(task="embed"))
    side.step([a], [], num_sampled_tokens=[0], pooled={5: b"abcd"})
    assert (a.finish_reason, str(a.error)) == ("error", "the worker has given no embedding")


def test_prompt_logprobs_go_to_those_that_run() -> None:
    side, a, b = Side(), running("a", slot=4), running("b", slot=2)
    b.status = RequestStatus.FINISHED
    chunks: Any = [PromptLogprobRows(2, 0, None), PromptLogprobRows(4, 8, None)]  # type: ignore[arg-type]  # not looked at
    result = side.step([a, b], [70, 80], prompt_logprobs=chunks)
    assert result.prompt_logprobs == [(a, chunks[1])]


@pytest.mark.parametrize(("cheaper", "is_swap_cheaper"), [(None, True), (False, False), (True, True)])
def test_times_of_steps_weigh_swapping(cheaper: bool | None, is_swap_cheaper: bool) -> None:
    side = Side(cheaper=cheaper)
    side.step([running("a")], [70], timings=StepTimings(forward_ns=900, prepare_ns=7), num_draft_tokens=[3])
    assert side.calls == [("took", 10, 907), ("cost", 900, 13), ("count", [3], None)]
    assert side.is_swap_cheaper is is_swap_cheaper


def test_results_come_in_the_order_of_steps() -> None:
    side = Side()
    with pytest.raises(AssertionError, match=r"^result of step 4, expected 3$"):
        side.step([running("a")], [70], number=4)


def test_a_loss_counts_against_what_was_in_flight_once() -> None:
    side, a, b, c, d = Side(), *(running(name) for name in "abcd")
    c.status = RequestStatus.FINISHED
    side.send([a, b])
    side.send([a, c])
    assert list(side.flights) == [a, b, a, c]
    assert side.flights.blame([d]) == []
    assert [request.num_crashes for request in (a, b, c, d)] == [1, 1, 0, 1]
    b.num_crashes = 0
    assert side.flights.blame() == []
    assert side.flights.blame() == [a], "more than two losses"
    assert (a.num_crashes, b.num_crashes, d.num_crashes) == (3, 2, 1)


def test_a_loss_counts_against_the_sequences_of_a_beam() -> None:
    side, beam, owner = Side(), running("beam"), running("owner")
    beam.beam_group = SimpleNamespace(sequences=[owner])  # type: ignore[assignment]  # all that is asked of it
    side.send([beam])
    side.flights.blame()
    assert (beam.num_crashes, owner.num_crashes) == (0, 1)


@pytest.mark.parametrize(("bound", "fits"), [(48, True), (47, False)])
def test_a_message_takes_as_many_as_have_room(bound: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plan, "MAX_NEW_BYTES", bound + 2 * make_request("a", 1).sampling_params.num_bytes)
    plan, a, b = StepPlan(budget=100), make_request("a", 5), make_request("b", 7)
    assert plan.can_admit(make_request("long", 5000)), "one alone may be larger"
    plan.admit(a, 5, num_cached_tokens=0)
    assert plan.can_admit(b) is fits
    assert plan.num_new_bytes == 20 + a.sampling_params.num_bytes


def test_a_step_carries_every_move() -> None:
    request = make_request("a", 6)
    request.eos_token_ids = (2, 3)
    request.slot, request.index, request.block_ids, request.group_block_ids = 5, 1, [8, 9], [[4, 5]]
    request.output_token_ids.append(70)
    plan = StepPlan(budget=100, num_tables=2)
    plan.admit(request, 2, num_cached_tokens=4)
    other = make_request("b", 3)
    other.slot = 7
    plan.add(other, 1, num_ahead=2, blocks=[20, 21, 30, 31])
    assert plan.budget == 95
    adapters = SimpleNamespace(number_of=lambda request: 11 + request.slot, take_removals=lambda: [3])
    transfers = Transfers({1: 2}, [(3, 4)], {5: 6}, [(7, 8)], [(9, 10)], [(11, 12)], [(13, 14)])
    output = plan.output(step=9, freed_slots=[1], transfers=transfers, adapters=adapters)  # type: ignore[arg-type]  # all that is asked of them
    assert (output.step, output.freed_slots, output.slots, output.num_scheduled_tokens) == (9, [1], [5, 7], [2, 1])
    assert (output.appended_slots, output.appended_block_ids) == ([7] * 4, [20, 21, 30, 31])
    assert (output.appended_groups, output.num_tokens, output.num_lookahead_tokens) == ([0, 0, 1, 1], 3, [0, 2])
    assert (output.blocks_to_swap_out, output.blocks_to_swap_in, output.blocks_to_copy) == (
        [(2, 1)],
        [(3, 4)],
        [(6, 5)],
    )
    assert (output.states_to_load, output.states_to_save) == ([(7, 8)], [(9, 10)])
    assert (output.states_to_swap_out, output.states_to_swap_in) == ([(11, 12)], [(13, 14)])
    assert output.loras_to_remove == [3]
    (new,) = output.new_requests
    assert (new.slot, new.request_id, list(new.prompt_token_ids)) == (5, "a/1", list(range(1000, 1006)))
    assert (new.output_token_ids, new.eos_token_ids, new.num_computed_tokens) == ([70], (2, 3), 4)
    assert (new.block_ids, new.group_block_ids, new.lora_number) == ([8, 9], [[4, 5]], 16)
    assert (new.is_beam, new.pooling, new.sampling_params) == (False, None, request.sampling_params)


class Compiler:
    """A worker that is asked to compile."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.released: list[str] = []
        self.holds = ConstraintHolds(
            start=lambda params: self.started.append(str(params.regex)),
            release=lambda params: self.released.append(str(params.regex)),
        )


def under(regex: str, tenant: str = "") -> Request:
    return make_request(regex[:9], 6, structured_outputs=StructuredOutputsParams(regex=regex), tenant=tenant)


def test_two_are_compiled_at_a_time_and_tenants_take_turns() -> None:
    compiler = Compiler()
    for regex, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("a4", "a"), ("b1", "b")):
        compiler.holds.announce(under(regex, tenant))
    assert compiler.started == ["a1", "a2"]
    for regex in ("a1", "a2", "a3"):
        compiler.holds.compiled(StructuredOutputsParams(regex=regex))
    assert compiler.started == ["a1", "a2", "a3", "b1", "a4"]


@pytest.mark.parametrize(("size", "num_started"), [(LARGE - 1, 2), (LARGE, 1)])
def test_of_large_ones_one_is_compiled_at_a_time(size: int, num_started: int) -> None:
    compiler = Compiler()
    unit = StructuredOutputsParams(regex="x").num_bytes - 1
    for letter in "ab":
        compiler.holds.announce(under(letter * (size - unit)))
    assert len(compiler.started) == num_started


def test_a_suspect_s_constraint_is_compiled_alone() -> None:
    compiler, plain = Compiler(), make_request("plain", 3)
    compiler.holds.announce(under("a"))
    suspect = under("s")
    assert not compiler.holds.is_ready_alone(plain), "another one is compiled"
    assert not compiler.holds.is_ready_alone(suspect)
    compiler.holds.announce(under("b"))
    assert compiler.started == ["a"]
    compiler.holds.compiled(StructuredOutputsParams(regex="a"))
    assert compiler.holds.is_ready_alone(plain)
    assert not compiler.holds.is_ready_alone(suspect)
    assert compiler.started == ["a", "s"]
    compiler.holds.compiled(StructuredOutputsParams(regex="s"))
    assert compiler.holds.is_ready_alone(suspect)
    assert compiler.started == ["a", "s"]
    compiler.holds.resume()
    assert compiler.started == ["a", "s", "b"]


def test_an_idle_constraint_is_released_after_the_steps_that_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_scheduler.core.constraint_holds.MAX_IDLE", 1)
    compiler = Compiler()
    compiler.holds.sent(5)
    for regex in ("a", "b"):
        request = under(regex)
        compiler.holds.announce(request)
        assert not compiler.holds.is_ready(request)
        assert compiler.holds.compiled(StructuredOutputsParams(regex=regex)) == [request]
        assert compiler.holds.is_ready(request)
        compiler.holds.leave(request)
    compiler.holds.answered(5)
    assert compiler.released == []
    compiler.holds.answered(6)
    assert compiler.released == ["a"]
    assert compiler.holds.forget_idle()
    assert compiler.released == ["a", "b"]
    assert not compiler.holds.forget_idle()


def test_who_is_compiled_for_is_known() -> None:
    compiler = Compiler()
    first, second, third = under("a"), under("a"), under("b")
    for request in (first, second, third):
        compiler.holds.announce(request)
    assert list(compiler.holds.being_compiled) == [first, second, third]
    assert compiler.holds.failed(StructuredOutputsParams(regex="a")) == [first, second]
    assert list(compiler.holds.being_compiled) == [third]
    assert compiler.holds._of[third].status is HoldStatus.COMPILING
