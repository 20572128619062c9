"""Stories about models whose layers keep different things of a sequence."""

import pytest

from pagoda_common.config.engine_config import CacheConfig, SchedulerConfig
from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput, StepTimings
from pagoda_scheduler.kv.block_tables import BlockTables
from pagoda_scheduler.kv.cache_group import NO_BLOCK, CacheGroup, CacheSizes
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_request, make_scheduler, run

FULL, WINDOW = CacheGroup("full"), CacheGroup("window", window=6)
MIXED = (FULL, WINDOW)


def step(scheduler: Scheduler, worker: PretendWorker) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(worker.execute(output))
    return output


def tables(request: Request) -> tuple[list[int], ...]:
    return request.block_ids, *request.group_block_ids


def test_a_window_keeps_the_blocks_that_the_next_query_reads() -> None:
    scheduler, worker = make_scheduler(groups=MIXED), PretendWorker(groups=MIXED)
    request = make_request("a", 13, max_tokens=8)
    scheduler.add(request)
    step(scheduler, worker)
    full, window = tables(request)
    assert NO_BLOCK not in full
    assert [block_id == NO_BLOCK for block_id in window] == [True, False, False, False]  # the query at 12 reads from 7
    assert scheduler.kv.pool.num_used_blocks == 4 + 3
    run(scheduler, worker)
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 8)
    assert scheduler.kv.pool.num_used_blocks == 0


def test_new_blocks_come_for_every_group_and_old_ones_of_a_window_go() -> None:
    scheduler, worker = make_scheduler(groups=MIXED), PretendWorker(groups=MIXED)
    request = make_request("a", 16, max_tokens=8)
    scheduler.add(request)
    step(scheduler, worker)
    output = step(scheduler, worker)
    assert (output.appended_slots, output.appended_groups) == ([0, 0], [0, 1])
    assert output.appended_block_ids == [table[-1] for table in tables(request)]
    assert request.first_blocks == [0, 2]


def test_a_chunk_keeps_what_its_first_query_reads() -> None:
    scheduler, worker = make_scheduler(groups=MIXED, max_num_batched_tokens=10), PretendWorker(groups=MIXED)
    request = make_request("a", 40)
    scheduler.add(request)
    firsts = []
    for _ in range(4):
        step(scheduler, worker)
        firsts.append(request.first_blocks[1])
    assert firsts == [1, 3, 6, 8]  # queries at 9, 19, 29 and 39, which may run again, read from 4, 14, 24 and 34 on


def test_a_preempted_sequence_is_sent_with_what_is_left_of_its_window() -> None:
    scheduler, worker = make_scheduler(groups=MIXED), PretendWorker(groups=MIXED)
    request = make_request("a", 21, max_tokens=8)
    scheduler.add(request)
    step(scheduler, worker)
    scheduler.park(request)
    assert scheduler.kv.pool.num_used_blocks == 0
    scheduler.unpark(request)
    output = step(scheduler, worker)
    (new,) = output.new_requests
    assert new.num_computed_tokens == 20
    assert [block_id == NO_BLOCK for block_id in new.group_block_ids[0]] == [True] * 3 + [False] * 3
    assert NO_BLOCK not in new.block_ids
    run(scheduler, worker)
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 8)


def test_a_prefix_needs_every_block_of_full_attention_and_the_last_ones_of_a_window() -> None:
    scheduler, worker = make_scheduler(groups=MIXED), PretendWorker(groups=MIXED)
    prompt = list(range(100, 133))
    scheduler.add(make_request("first", prompt, max_tokens=1))
    run(scheduler, worker)
    kv, again = scheduler.kv, make_request("again", prompt)
    assert kv.find_prefix(again).num_tokens == 32
    hashes = kv.prefix_hashes(again)
    kv.pool.forget(kv.tables.key(1, hashes[2]))
    assert kv.find_prefix(again).num_tokens == 32, "long out of the window"
    kv.pool.forget(kv.tables.key(1, hashes[6]))
    assert kv.find_prefix(again).num_tokens == 24, "the query at 32 reads from 27 on"
    kv.pool.forget(kv.tables.key(1, hashes[4]))
    assert kv.find_prefix(again).num_tokens == 8, "the query at 24 reads from 19 on, at 16 from 11"
    kv.pool.forget(hashes[1])
    assert kv.find_prefix(again).num_tokens == 4
    run_one = make_request("other", prompt, max_tokens=3)
    scheduler.add(run_one)
    run(scheduler, worker)
    assert run_one.output_token_ids == expected_output(prompt, 3)
    assert scheduler.kv.num_prefix_hits == 4


def test_the_same_content_of_two_groups_is_two_blocks() -> None:
    scheduler, worker = make_scheduler(groups=(FULL, FULL, FULL)), PretendWorker(groups=(FULL, FULL, FULL))
    scheduler.add(make_request("a", 9, max_tokens=1))
    run(scheduler, worker)
    assert scheduler.kv.pool.num_cached_blocks == 6
    assert len({len(block_hash) for block_hash in scheduler.kv.pool.hashes}) == 2
    assert scheduler.kv.reset_cache() == 6


def test_blocks_that_have_left_a_window_are_forgotten_with_a_failed_sequence() -> None:
    scheduler, worker = make_scheduler(groups=MIXED), PretendWorker(groups=MIXED)
    worker.bad.add("a/0")
    request = make_request("a", 21)
    scheduler.add(request)
    step(scheduler, worker)
    assert request.finish_reason == "error"
    assert scheduler.kv.pool.num_cached_blocks == 0


@pytest.mark.parametrize(("num_decoded", "num_shared"), [(1, 20), (3, 20), (8, 0)])
def test_siblings_share_a_prompt_while_it_is_in_the_window(num_decoded: int, num_shared: int) -> None:
    scheduler = make_scheduler(groups=MIXED, enable_prefix_caching=False)
    worker = PretendWorker(groups=MIXED)
    first, second = (make_request("a", 21, index=index, max_tokens=20) for index in range(2))
    second.leader = first
    scheduler.add(first)
    for _ in range(num_decoded):
        step(scheduler, worker)
    scheduler.add(second)
    output = step(scheduler, worker)
    assert output.new_requests[0].num_computed_tokens == num_shared
    run(scheduler, worker)
    assert first.output_token_ids == second.output_token_ids == expected_output(first.prompt_token_ids, 20)


def test_the_longest_sequence_is_one_that_fits_every_group() -> None:
    def most(num_blocks: int, *groups: CacheGroup) -> int | None:
        return BlockTables(groups=groups, block_size=4, max_step_tokens=8).capacity(num_blocks)

    window = CacheGroup("window", window=8)  # 7 tokens before a step of 8: 5 blocks at most
    assert most(10, FULL) == 40
    assert most(10, FULL, FULL) == 20
    assert most(11, FULL, window) == 24, "6 and 5"
    assert most(16, FULL, window, window) == 24
    assert most(6, FULL, window) == 12, "3 and 3"
    assert most(5, window) is None
    assert most(4, window) == 16
    assert most(0, CacheGroup("recurrent")) is None
    assert make_scheduler(groups=(FULL, window), num_blocks=11, max_num_batched_tokens=8).max_model_len == 24


def test_a_model_with_windows_holds_less_than_two_fifths_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """26 layers, every sixth of full attention, the others with a window of 512: groups of 4 layers, one padded."""
    windows = [CacheGroup("window", num_layers, window=512) for num_layers in (4, 4, 4, 4, 4, 2)]
    groups = (CacheGroup("full", 4), *windows)
    num_tokens = 32 * 1024
    scheduler = make_scheduler(
        groups=groups, num_blocks=8192, block_size=16, max_model_len=40_000, max_num_batched_tokens=2048
    )
    request = make_request("a", num_tokens, max_tokens=64)
    request.max_num_tokens = num_tokens + 64
    scheduler.add(request)
    pool, used = scheduler.kv.pool, []
    allocate = pool.allocate

    def watched(count: int) -> list[int]:
        blocks = allocate(count)
        used.append(pool.num_used_blocks)  # in the step: what it reads for the last time is given back after that
        return blocks

    monkeypatch.setattr(pool, "allocate", watched)
    while (output := scheduler.schedule()) is not None:
        is_over = request.num_computed_tokens >= num_tokens
        scheduler.update(ModelRunnerOutput(output.step, [int(is_over)], [7] * is_over))
    today = 26 * scheduler.kv.blocks_for(num_tokens)  # blocks of one layer
    assert 4 * max(used) <= 0.25 * today
    assert 4 * used[-1] <= 0.2 * today, "while it decodes"


@pytest.mark.parametrize(("groups", "is_cheaper"), [((FULL,), True), ((FULL, WINDOW), True), ((FULL, FULL), False)])
def test_swapping_moves_a_block_of_every_group_of_full_attention(
    groups: tuple[CacheGroup, ...], is_cheaper: bool
) -> None:
    scheduler = Scheduler(
        config=SchedulerConfig(),
        cache=CacheConfig(),
        sizes=CacheSizes(100, 9),
        max_model_len=200,
        groups=groups,
        swap_block_ns=10_000,
    )
    scheduler.add(make_request("a", 100, max_tokens=1))
    output = scheduler.schedule()
    assert output is not None
    timings = StepTimings(forward_ns=100 * 2_000)  # 32,000 ns for 16 tokens; two moves of a block take 20,000
    scheduler.update(ModelRunnerOutput(output.step, None, [1], timings=timings))
    assert scheduler.kv.is_swap_cheaper is is_cheaper


def test_what_keeps_nothing_is_computed_whole() -> None:
    groups = (CacheGroup("none"),)
    scheduler = make_scheduler(groups=groups, num_blocks=0, max_num_batched_tokens=15, max_model_len=20)
    worker = PretendWorker(groups=groups)
    requests = [make_request(name, 12, max_tokens=1, pooling=PoolingParams()) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    chunks = [step(scheduler, worker).num_scheduled_tokens for _ in requests]
    assert chunks == [[12], [12]], "neither is cut, and nothing of the first is found"
    assert [request.embedding for request in requests] == [PretendWorker.embedding(range(1000, 1012))] * 2
    scheduler.admission.check_fits([make_request("c", 20, max_tokens=1, pooling=PoolingParams())])
    with pytest.raises(RequestTooLong):
        scheduler.admission.check_fits([make_request("c", 21, max_tokens=1, pooling=PoolingParams())])
    with pytest.raises(InvalidRequest, match="the model does not generate text"):
        scheduler.admission.check_fits([make_request("d", 2, max_tokens=1)])
