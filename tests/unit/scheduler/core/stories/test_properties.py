"""Whatever is submitted and aborted when: no token is lost, repeated or foreign, and every block comes back."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import MAX_IN_FLIGHT, Scheduler
from pagoda_scheduler.core.step import SchedulerOutput
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheGroup
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_request, make_scheduler

PROMPTS = st.one_of(
    st.integers(1, 30),
    st.lists(st.integers(10, 12), min_size=1, max_size=30),  # few different tokens: many shared prefixes
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS, st.integers(1, 12), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("abort"), st.integers(0, 50)),
    st.tuples(st.just("send")),
    st.tuples(st.just("receive")),
)


def check(scheduler: Scheduler) -> None:
    """Reference counts, free queue and hash chains agree with the block tables."""
    scheduler.kv.pool.check_invariants()
    references: dict[int, int] = {}
    tables = scheduler.kv.tables
    for request in scheduler.running:
        held = tables.held(request)
        assert len(set(held)) == len(held) == request.num_blocks
        for block_id in held:
            references[block_id] = references.get(block_id, 0) + 1
    for source in scheduler.kv._transfers.copy.values():  # kept for a copy that goes with the next step
        references[source] = references.get(source, 0) + 1
    assert references == {b: c for b, c in enumerate(scheduler.kv.pool._ref_counts) if c > 0}
    num_ahead = MAX_IN_FLIGHT * scheduler.speculation.num_speculative_tokens  # all of which may have been wrong
    for request in scheduler.running:  # no more blocks than steps in flight and the next one could fill
        most = request.num_computed_tokens + num_ahead + 1
        assert len(request.block_ids) <= max(
            scheduler.kv.blocks_for(most), scheduler.kv.blocks_for(request.num_prompt_tokens)
        )
        assert len(tables.held(request)) <= tables.num_needed(max(most, request.num_prompt_tokens), 0)
    if scheduler.kv.states is not None:
        check_states(scheduler)
    slots = [request.slot for request in scheduler.running]
    assert len(set(slots)) == len(slots)


def check_states(scheduler: Scheduler) -> None:
    """Every snapshot is in one state, and held by those who know of it."""
    assert scheduler.kv.states is not None
    snapshots = scheduler.kv.states.snapshots
    snapshots.check_invariants()
    holders: dict[int, int] = {}
    for request in scheduler.running:
        held = [request.held_state] if request.held_state >= 0 else []
        for snapshot in (*held, *(snapshot for _, snapshot in request.unnamed_states)):
            holders[snapshot] = holders.get(snapshot, 0) + 1
    assert holders == snapshots._holders


FULL, RECURRENT = CacheGroup("full"), CacheGroup("recurrent")
GROUPS = [
    ONE_GROUP,
    (FULL, CacheGroup("window", window=6), CacheGroup("window", window=1)),
    (CacheGroup("window", window=9), FULL),
    (CacheGroup("window", window=5),),
    (FULL, RECURRENT),
    (RECURRENT, CacheGroup("window", window=7), FULL),
    (RECURRENT,),
]


@settings(max_examples=300, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=60),
    groups=st.sampled_from(GROUPS),
    num_blocks=st.integers(11, 30),
    window=st.integers(1, 3),
    prefix_caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    threshold=st.sampled_from([0, 3]),
    budget=st.sampled_from([5, 17, 64]),
    num_host_blocks=st.sampled_from([0, 3, 20]),
    num_snapshots=st.sampled_from([0, 1, 2, 3, 30]),
    num_host_snapshots=st.sampled_from([0, 4]),
    interval=st.sampled_from([4, 10]),
    num_ahead=st.sampled_from([0, 1, 4, 7]),
    seed=st.integers(0, 1000),
)
def test_random_mixes_lose_and_leak_nothing(
    actions: list[tuple],  # type: ignore[type-arg]
    groups: tuple[CacheGroup, ...],
    num_blocks: int,
    window: int,
    prefix_caching: bool,
    policy: str,
    threshold: int,
    budget: int,
    num_host_blocks: int,
    num_snapshots: int,
    num_host_snapshots: int,
    interval: int,
    num_ahead: int,
    seed: int,
) -> None:
    scheduler = make_scheduler(
        groups=groups,
        num_blocks=num_blocks * len(groups),
        max_model_len=44,
        enable_prefix_caching=prefix_caching,
        policy=policy,
        long_prefill_token_threshold=threshold,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        num_host_blocks=num_host_blocks,
        num_snapshots=num_snapshots,
        num_host_snapshots=num_host_snapshots,
        snapshot_interval=interval,
        num_speculative_tokens=num_ahead,
    )
    guesses = random.Random(seed)

    def guess(most: int) -> tuple[int, int]:
        num_tried = guesses.randint(0, most)
        return num_tried, guesses.randint(0, num_tried)

    worker = PretendWorker(groups=groups, guess=guess)
    requests: list[Request] = []
    aborted: set[Request] = set()
    in_flight: list[SchedulerOutput] = []

    def receive() -> None:
        scheduler.update(worker.execute(in_flight.pop(0)))

    for action in actions:
        match action:
            case ("add", prompt, max_tokens, priority, n):
                name, leader = f"r{len(requests)}", None
                for index in range(n):
                    request = make_request(
                        name, prompt, index=index, max_tokens=max_tokens, priority=priority, tenant=str(priority)
                    )
                    request.arrival_ns = len(requests)
                    request.leader, leader = leader, leader or request
                    requests.append(request)
                    scheduler.add(request)
            case ("abort", number) if requests:
                request = requests[number % len(requests)]
                if not request.is_finished:
                    scheduler.finish(request)
                    aborted.add(request)
            case ("send",) if len(in_flight) < window:
                if (output := scheduler.schedule()) is not None:
                    in_flight.append(output)
            case ("receive",) if in_flight:
                receive()
        check(scheduler)
    for _ in range(5000):
        while len(in_flight) < window and (output := scheduler.schedule()) is not None:
            in_flight.append(output)
        check(scheduler)
        if not in_flight:
            break
        receive()
        check(scheduler)
    assert not scheduler.has_unfinished_requests
    assert scheduler.kv.pool.num_used_blocks == 0
    counters = scheduler.speculation.counters
    assert counters.num_draft_tokens == worker.num_tried
    assert counters.num_accepted_tokens == sum(counters.num_accepted_tokens_per_pos)
    for request in requests:
        expected = expected_output(request.prompt_token_ids, request.max_num_tokens - request.num_prompt_tokens)
        if request in aborted:
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == expected
