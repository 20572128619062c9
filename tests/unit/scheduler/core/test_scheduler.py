"""Stories about which tokens run when."""

import pytest

from pagoda_common.config.engine_config import CacheConfig, SchedulerConfig
from pagoda_common.errors import QueueFull, RequestTooLong
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput, StepTimings
from pagoda_scheduler.kv.cache_group import CacheSizes
from tests.unit.scheduler.stories import EOS, PretendWorker, expected_output, make_request, make_scheduler, run


def answer(output: SchedulerOutput, *tokens: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(output.step, None, list(tokens))


def test_two_prompts_run_whole_in_the_first_step_and_one_token_each_after_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5))
    scheduler.add(make_request("b", [1, 2, 3]))
    first = scheduler.schedule()
    assert first is not None
    assert first.num_scheduled_tokens == [5, 3]
    assert [new.request_id for new in first.new_requests] == ["a/0", "b/0"]
    scheduler.update(answer(first, 50, 60))
    second = scheduler.schedule()
    assert second is not None
    assert second.num_scheduled_tokens == [1, 1]
    assert not second.new_requests


def test_the_next_step_is_scheduled_before_the_result_of_the_last_is_known() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 5, max_tokens=2)
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert second.num_scheduled_tokens == [1]
    assert scheduler.schedule() is None, "max_tokens are in flight already"
    scheduler.update(answer(first, 50))
    result = scheduler.update(answer(second, 51))
    assert result.finished == [request]
    assert request.output_token_ids == [50, 51]
    assert request.finish_reason == "length"


def test_a_token_sampled_after_the_end_is_never_delivered() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 5, max_tokens=9)
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert scheduler.update(answer(first, EOS)).finished == [request]
    late = scheduler.update(answer(second, 99))
    assert late.token_ids == []
    assert request.output_token_ids == [EOS]
    assert scheduler.kv.pool.num_used_blocks == 0


def test_a_stop_token_is_the_stop_reason_and_an_end_token_is_not() -> None:
    for token, reason in ((42, 42), (EOS, None)):
        scheduler = make_scheduler()
        request = make_request("a", 3, stop_token_ids=[42])
        scheduler.add(request)
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(answer(output, token))
        assert (request.finish_reason, request.stop_token_id) == ("stop", reason)


def test_ignore_eos_goes_on() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3, ignore_eos=True)
    scheduler.add(request)
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(answer(output, EOS))
    assert not request.is_finished


def test_a_long_prompt_is_chunked_after_running_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("short", [1, 2, 3]))
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(answer(output, 9))
    scheduler.add(make_request("long", 40))
    chunks = []
    for _ in range(3):
        output = scheduler.schedule()
        assert output is not None
        chunks.append(output.num_scheduled_tokens)
        tokens = [9, 9] if chunks[-1] == [1, 10] else [9]
        counts = [1, 1] if chunks[-1] == [1, 10] else [1, 0]
        scheduler.update(ModelRunnerOutput(output.step, counts, tokens))
    assert chunks == [[1, 15], [1, 15], [1, 10]]


def test_a_threshold_bounds_one_prompts_share_of_a_step() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=10)
    scheduler.add(make_request("long", 40))
    scheduler.add(make_request("other", [5, 6, 7]))
    output = scheduler.schedule()
    assert output is not None
    assert output.num_scheduled_tokens == [10, 3]


def test_without_chunked_prefill_a_prompt_waits_until_it_fits() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=12)
    scheduler.add(make_request("a", 8))
    scheduler.add(make_request("b", [1] * 8))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert first.num_scheduled_tokens == [8]
    assert second.num_scheduled_tokens == [1, 8]
    with pytest.raises(RequestTooLong, match="max_num_batched_tokens is 12"):
        scheduler.admission.check([make_request("c", 13)])


def test_a_full_block_is_shared_by_a_second_request() -> None:
    scheduler = make_scheduler()
    first, second = make_request("a", 11), make_request("b", 11)
    scheduler.add(first)
    scheduler.add(second)
    output = scheduler.schedule()
    assert output is not None
    assert output.num_scheduled_tokens == [11, 3], "even within one step"
    assert first.block_ids[:2] == second.block_ids[:2]
    assert first.block_ids[2] != second.block_ids[2]
    assert (scheduler.kv.num_prefix_queries, scheduler.kv.num_prefix_hits) == (22, 8)


def test_a_prompt_of_whole_blocks_still_computes_its_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 8))
    scheduler.add(make_request("b", 8))
    output = scheduler.schedule()
    assert output is not None
    assert output.num_scheduled_tokens == [8, 4]


def test_prefixes_are_shared_only_under_the_same_salt() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 8, cache_salt="x"))
    scheduler.add(make_request("b", 8, cache_salt="y"))
    output = scheduler.schedule()
    assert output is not None
    assert output.num_scheduled_tokens == [8, 8]


def test_a_finished_prompt_is_found_again_and_its_tail_is_evicted_first() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    worker = PretendWorker()
    for name, prompt, hits in (("a", 12, 0), ("b", 12, 8), ("c", [1] * 20, 0), ("d", 12, 4)):
        before = scheduler.kv.num_prefix_hits
        scheduler.add(make_request(name, prompt, max_tokens=1))
        run(scheduler, worker)
        assert scheduler.kv.num_prefix_hits - before == hits, name


@pytest.mark.parametrize("window", [1, 2])
def test_preemption_changes_no_token(window: int) -> None:
    scheduler = make_scheduler(num_blocks=12, max_model_len=40)
    worker = PretendWorker()
    requests = [make_request(str(i), [100 + i] * 9, max_tokens=20) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, worker, window=window)
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 20)
    assert scheduler.kv.pool.num_used_blocks == 0


def test_an_abort_frees_blocks_at_once_and_its_late_token_is_dropped() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 9)
    scheduler.add(request)
    output = scheduler.schedule()
    assert output is not None
    scheduler.finish(request)
    assert scheduler.kv.pool.num_used_blocks == 0
    assert scheduler.update(answer(output, 1)).requests == []
    following = make_request("b", [4, 4])
    scheduler.add(following)
    output = scheduler.schedule()
    assert output is not None
    assert output.freed_slots == [0]
    assert output.slots == [0]


def test_a_bad_slot_ends_one_request_and_its_blocks_are_not_found_again() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    bad, good = make_request("bad", [1] * 8), make_request("good", [2] * 8)
    worker.bad.add("bad/0")
    scheduler.add(bad)
    scheduler.add(good)
    run(scheduler, worker)
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert "not a number" in bad.error.message
    assert good.output_token_ids == expected_output([2] * 8, 4)
    scheduler.add(make_request("again", [1] * 8))
    output = scheduler.schedule()
    assert output is not None
    assert output.num_scheduled_tokens == [8]


def test_a_lost_worker_gives_every_request_back_with_its_token_log() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    requests = [make_request(str(i), [50 + i] * 6, max_tokens=10) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    scheduler.update(worker.execute(first))
    orphans = scheduler.take_all()
    assert orphans == requests
    assert [len(request.output_token_ids) for request in requests] == [1, 1, 1]
    successor = make_scheduler()
    for request in orphans:
        successor.add(request)
    run(successor, PretendWorker())
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 10)


def test_the_queue_is_bounded_when_asked() -> None:
    scheduler = make_scheduler(max_num_queued_reqs=1, max_num_queued_tokens=30)
    with pytest.raises(QueueFull, match="max_num_queued_tokens is 30"):
        scheduler.admission.check([make_request("a", 31)])
    scheduler.add(make_request("a", 5))
    with pytest.raises(QueueFull, match="max_num_queued_reqs is 1"):
        scheduler.admission.check([make_request("b", 5)])


def test_without_chunked_prefill_a_sequence_that_has_outgrown_a_step_is_recomputed_all_the_same() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, enable_chunked_prefill=False)
    outgrown, small = make_request("outgrown", 12, max_tokens=20), make_request("small", 4)
    outgrown.output_token_ids = expected_output(outgrown.prompt_token_ids, 10)
    outgrown.num_tokens += 10
    scheduler.admission.check_fits([outgrown])
    scheduler.add(outgrown, at_front=True)
    scheduler.add(small)
    run(scheduler, PretendWorker())
    assert outgrown.output_token_ids == expected_output(outgrown.prompt_token_ids, 20)
    assert small.output_token_ids == expected_output(small.prompt_token_ids, 4)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=20)
    with pytest.raises(RequestTooLong, match="prompt has 20 tokens, max_model_len is 20"):
        scheduler.admission.check([make_request("a", 20)])


def test_under_priority_the_lower_number_is_admitted_first_and_preempted_last() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    for name, priority in (("late", 5), ("urgent", -1), ("usual", 0)):
        scheduler.add(make_request(name, [priority + 50], priority=priority, max_tokens=1))
    worker, order = PretendWorker(), []
    for result in run(scheduler, worker, window=1):
        order += [request.request_id for request in result.finished]
    assert order == ["urgent", "usual", "late"]


def test_an_urgent_request_takes_the_place_of_a_less_urgent_running_one() -> None:
    scheduler, worker = make_scheduler(policy="priority", max_num_seqs=1), PretendWorker()
    usual = make_request("usual", [5] * 6, priority=1, max_tokens=8)
    scheduler.add(usual)
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(worker.execute(output))
    urgent = make_request("urgent", [6] * 6, priority=0, max_tokens=2)
    scheduler.add(urgent)
    order = [request.request_id for result in run(scheduler, worker) for request in result.finished]
    assert order == ["urgent", "usual"]
    assert usual.num_preemptions == 1
    assert usual.output_token_ids == expected_output([5] * 6, 8)


def test_the_fair_policy_lets_a_quiet_tenant_pass_a_greedy_one() -> None:
    scheduler, worker = make_scheduler(policy="fair", max_num_seqs=1), PretendWorker()
    for number in range(4):
        scheduler.add(make_request(f"greedy{number}", [number + 1] * 8, tenant="greedy"))
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(worker.execute(output))
    scheduler.add(make_request("quiet", [9] * 4, tenant="quiet"))
    order = [request.request_id for result in run(scheduler, worker) for request in result.finished]
    assert order == ["greedy0", "quiet", "greedy1", "greedy2", "greedy3"]


@pytest.mark.parametrize("prompt", [9, 8, 1])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_siblings_share_the_prompt_and_copy_its_last_block_when_they_write(prompt: int, prefix_caching: bool) -> None:
    scheduler, worker = make_scheduler(enable_prefix_caching=prefix_caching), PretendWorker()
    siblings = [make_request("a", prompt, index=index, max_tokens=6) for index in range(3)]
    for sibling in siblings:
        sibling.leader = siblings[0] if sibling.index else None
        scheduler.add(sibling)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert first.num_scheduled_tokens == [prompt]
    assert second.num_scheduled_tokens == [1, 1, 1]
    assert len(second.blocks_to_copy) == (2 if (prompt - 1) % 4 else 0)
    scheduler.update(worker.execute(first))
    scheduler.update(worker.execute(second))
    run(scheduler, worker)
    for sibling in siblings:
        assert sibling.output_token_ids == expected_output(sibling.prompt_token_ids, 6)
    assert scheduler.kv.pool.num_used_blocks == 0


def test_a_sibling_does_not_copy_from_a_leader_whose_blocks_are_written_in_the_same_step() -> None:
    prompt = [11, 12, 13, 14, 15, 16, 17, 18]  # two blocks
    tokens = expected_output(prompt, 6)
    # As after a lost worker: the first one computes the prompt again, the leader finds it, the sibling has no token.
    first = make_request("first", prompt, max_tokens=6, output_token_ids=tokens[:2])
    leader, sibling = (
        make_request("pair", prompt, index=index, max_tokens=6, output_token_ids=tokens[: 1 - index])
        for index in range(2)
    )
    sibling.leader = leader
    scheduler = make_scheduler()
    for request in (first, leader, sibling):
        scheduler.add(request)
    run(scheduler, PretendWorker())
    assert [request.output_token_ids for request in (first, leader, sibling)] == [tokens] * 3


def test_a_host_block_that_is_evicted_twice_in_a_step_gets_the_last_content_only() -> None:
    scheduler = make_scheduler(num_blocks=12, max_model_len=44, num_host_blocks=2, preemption_mode="swap")
    worker = PretendWorker()
    prompts = [[10 + name] * 40 for name in range(3)]  # each takes most of the cache, and so evicts the one before
    for name, prompt in enumerate([*prompts, *reversed(prompts)]):
        request = make_request(str(name), prompt, max_tokens=3)
        scheduler.add(request)
        run(scheduler, worker)  # which refuses two moves to one block
        assert request.output_token_ids == expected_output(prompt, 3)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_preempted_request_comes_back_from_host_memory(prefix_caching: bool) -> None:
    scheduler = make_scheduler(
        num_blocks=12, max_model_len=40, num_host_blocks=50, enable_prefix_caching=prefix_caching
    )
    worker, swapped, computed = PretendWorker(), 0, 0
    requests = [make_request(str(i), [100 + i] * 9, max_tokens=20) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    while (output := scheduler.schedule()) is not None:
        swapped += len(output.blocks_to_swap_in)
        computed += output.num_tokens
        scheduler.update(worker.execute(output))
    assert scheduler.num_preemptions > 0
    assert swapped > 0
    assert computed < 5 * 29 + scheduler.num_preemptions * 5, "only the last, partial block is computed again"
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 20)


def test_swapping_stops_when_it_costs_more_than_computing() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128)
    scheduler = Scheduler(
        config=config, cache=CacheConfig(), sizes=CacheSizes(100, 9), max_model_len=200, swap_block_ns=10_000
    )
    for forward_ns, is_cheaper in ((100 * 10_000, True), (100, False)):
        for number in range(20):
            scheduler.add(make_request(f"{forward_ns}-{number}", [forward_ns + number] * 100, max_tokens=1))
            output = scheduler.schedule()
            assert output is not None
            scheduler.update(ModelRunnerOutput(output.step, None, [1], timings=StepTimings(forward_ns=forward_ns)))
        assert scheduler.kv.is_swap_cheaper is is_cheaper
