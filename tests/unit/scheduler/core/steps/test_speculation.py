"""Stories about sequences that run ahead of what is known of them."""

from typing import Any

import pytest

from pagoda_common.errors import PagodaError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.speculation import SpeculationCounters
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.rpc.convert import StepEncoder
from tests.unit.scheduler.stories import EOS, PretendWorker, expected_output, make_request, make_scheduler, run


def started(scheduler: Scheduler, *requests: Request) -> None:
    """Prompts are computed, and each request has its first token, 50."""
    for request in requests:
        scheduler.add(request)
    scheduler.update(answer(scheduler.schedule(), *[[50] for _ in requests]))


def answer(output: SchedulerOutput | None, *tokens: list[int]) -> ModelRunnerOutput:
    """The worker's answer: some tokens for each sequence, all but the first of them guessed."""
    assert output is not None
    flat = [token for each in tokens for token in each]
    drafts = output.num_lookahead_tokens
    return ModelRunnerOutput(output.step, [len(each) for each in tokens], flat, num_draft_tokens=drafts)


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    return output


def test_a_decode_may_guess_and_a_prompt_may_not() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    running, prompt = make_request("a", [1, 2], max_tokens=20), make_request("b", [7, 8, 9], max_tokens=20)
    started(scheduler, running)
    scheduler.add(prompt)
    output = schedule(scheduler)
    assert (output.num_scheduled_tokens, output.num_lookahead_tokens) == ([1, 3], [3, 0])


def test_blocks_are_there_for_every_guess_of_the_steps_in_flight() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    request = make_request("a", [1, 2], max_tokens=40)
    started(scheduler, request)
    for num_blocks in (2, 3):  # 2 computed tokens, then up to 4 and 8 more; blocks of 4
        assert schedule(scheduler).num_lookahead_tokens == [3]
        assert len(request.block_ids) == num_blocks
    assert (request.num_computed_tokens, request.num_lookahead) == (4, 6)


def test_what_was_right_moves_the_sequence_on_and_what_was_wrong_does_not() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    request = make_request("a", [1, 2], max_tokens=40)
    started(scheduler, request)
    first, second = schedule(scheduler), schedule(scheduler)
    result = scheduler.update(answer(first, [51, 52, 53]))
    assert (result.token_ids, result.offsets, result.rows) == ([51, 52, 53], [1, 2, 3], [0, 1, 2])
    assert (request.num_computed_tokens, request.num_tokens, request.num_lookahead) == (6, 7, 3)
    assert scheduler.update(answer(second, [54])).token_ids == [54]
    assert (request.num_computed_tokens, request.num_tokens, request.num_lookahead) == (6, 7, 0)
    assert request.output_token_ids == [50, 51, 52, 53, 54]
    counters = scheduler.speculation.counters
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (2, 6, 2)
    assert counters.num_accepted_tokens_per_pos == [1, 1, 0]


def test_only_blocks_of_known_tokens_can_be_found() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    request = make_request("a", [1, 2], max_tokens=40)
    started(scheduler, request)
    first = schedule(scheduler)
    schedule(scheduler)
    assert request.num_cached_blocks == 0, "guesses fill it"
    scheduler.update(answer(first, [51, 52, 53]))
    assert request.num_cached_blocks == 1, "6 tokens are computed"
    other = make_request("b", [1, 2, 50, 51, 52, 53, 99, 98])
    assert scheduler.kv.find_prefix(other).num_tokens == 4


def test_nothing_is_delivered_after_an_end_token() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    request = make_request("a", [1, 2], max_tokens=40)
    started(scheduler, request)
    first, second = schedule(scheduler), schedule(scheduler)
    result = scheduler.update(answer(first, [51, EOS, 53, 54]))
    assert (result.token_ids, result.finished) == ([51, EOS], [request])
    assert (request.output_token_ids, request.finish_reason) == ([50, 51, EOS], "stop")
    assert scheduler.update(answer(second, [55, 56])).token_ids == []
    assert scheduler.kv.pool.num_used_blocks == 0


def test_nothing_is_guessed_after_the_last_token() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    request = make_request("a", [1, 2], max_tokens=5)
    started(scheduler, request)
    assert schedule(scheduler).num_lookahead_tokens == [3]  # tokens 2 to 5
    second = schedule(scheduler)  # if all of them were wrong
    assert second.num_lookahead_tokens == [2]
    assert len(request.block_ids) == 2, "7 tokens in all"


def test_more_tokens_than_the_longest_output_are_never_delivered() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    request = make_request("a", [1, 2], max_tokens=5)
    started(scheduler, request)
    first, second = schedule(scheduler), schedule(scheduler)
    scheduler.update(answer(first, [51, 52, 53]))
    assert scheduler.update(answer(second, [54, 55, 56])).token_ids == [54]
    assert (len(request.output_token_ids), request.finish_reason) == (5, "length")


def test_guesses_take_what_the_budget_has_left_when_everybody_has_a_token() -> None:
    scheduler = make_scheduler(num_speculative_tokens=4, max_num_batched_tokens=8)
    requests = [make_request(name, [1, 2], max_tokens=20) for name in "abc"]
    started(scheduler, *requests)
    output = schedule(scheduler)
    assert (output.num_scheduled_tokens, output.num_lookahead_tokens) == ([1, 1, 1], [4, 1, 0])


def test_nobody_is_preempted_for_a_guess() -> None:
    scheduler = make_scheduler(num_speculative_tokens=4, num_blocks=3)
    one, other = make_request("a", [1, 2], max_tokens=5), make_request("b", [3, 4], max_tokens=5)
    started(scheduler, one, other)
    output = schedule(scheduler)
    assert (output.num_scheduled_tokens, output.num_lookahead_tokens) == ([1, 1], [3, 0]), "one block was free"
    assert scheduler.num_preemptions == 0


def test_a_sequence_that_is_preempted_in_flight_keeps_what_was_right() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    request = make_request("a", [1, 2], max_tokens=40)
    started(scheduler, request)
    first = schedule(scheduler)
    scheduler.park(request)
    assert scheduler.kv.pool.num_used_blocks == 0
    scheduler.unpark(request)
    assert scheduler.schedule() is None, "its next token is being sampled"
    scheduler.update(answer(first, [51, 52, 53]))
    assert (request.num_computed_tokens, request.num_tokens, request.num_lookahead) == (0, 6, 0)
    again = schedule(scheduler)
    assert again.new_requests[0].output_token_ids == [50, 51, 52, 53]
    assert again.num_lookahead_tokens is None


@pytest.mark.parametrize(
    "params",
    [{"min_tokens": 3}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"extra_args": {"my": 1}}],
)
def test_sequences_whose_tokens_need_state_do_not_guess(params: dict[str, Any]) -> None:
    request = Request(
        request_id="a",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(seed=0, max_tokens=20, **params),
        max_model_len=200,
    )
    scheduler = make_scheduler(num_speculative_tokens=3)
    started(scheduler, request)
    assert schedule(scheduler).num_lookahead_tokens is None


def test_more_tokens_than_guesses_are_refused() -> None:
    scheduler = make_scheduler(num_speculative_tokens=1)
    started(scheduler, make_request("a", [1, 2], max_tokens=20))
    with pytest.raises(PagodaError, match="got 3 tokens, expected 1 to 2"):
        scheduler.update(answer(schedule(scheduler), [51, 52, 53]))


def test_a_lost_worker_takes_its_guesses_along() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    request = make_request("a", [1, 2], max_tokens=40)
    started(scheduler, request)
    schedule(scheduler), schedule(scheduler)
    assert scheduler.take_all() == [request]
    assert (request.num_tokens, request.num_lookahead, request.num_pending) == (3, 0, 0)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_the_output_does_not_depend_on_guesses(window: int, num_right: int) -> None:
    scheduler = make_scheduler(num_speculative_tokens=4, num_blocks=24)
    worker = PretendWorker(guess=lambda most: (most, min(most, num_right)))
    requests = [make_request(f"r{n}", list(range(5 + 4 * n)), max_tokens=20 + n) for n in range(6)]
    for request in requests:
        scheduler.add(request)
    results: list[StepResult] = run(scheduler, worker, window=window)
    for request in requests:
        assert (
            request.output_token_ids
            == expected_output(request.prompt_token_ids, request.max_num_tokens)[
                : request.max_num_tokens - request.num_prompt_tokens
            ]
        )
    assert sum(len(result.token_ids) for result in results) == sum(len(r.output_token_ids) for r in requests)
    assert scheduler.kv.pool.num_used_blocks == 0


def test_a_step_says_once_what_all_sequences_may_guess() -> None:
    encoder = StepEncoder(session_epoch=1, worker_incarnation=1)
    scheduler = make_scheduler(num_speculative_tokens=3)
    one, other = make_request("a", [1, 2], max_tokens=40), make_request("b", [3, 4], max_tokens=3)
    started(scheduler, one)
    message = encoder.encode(schedule(scheduler))
    assert (message.num_lookahead_slots, message.num_lookahead_tokens) == (3, b"")
    scheduler.add(other)
    encoder.encode(schedule(scheduler))
    message = encoder.encode(schedule(scheduler))
    assert (message.num_lookahead_slots, message.num_lookahead_tokens) == (0, bytes([3, 1]))


def test_counters_of_groups_add_up() -> None:
    one, other = SpeculationCounters(), SpeculationCounters()
    one.count(2, 2)
    other.count(4, 1)
    one.add(other)
    assert (one.num_drafts, one.num_draft_tokens, one.num_accepted_tokens) == (2, 6, 3)
    assert one.num_accepted_tokens_per_pos == [2, 1, 0, 0]
