"""Ten thousand requests of every kind through one scheduler: the right tokens, and every block free at the end."""

import random

import pytest

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import SchedulerOutput
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheGroup
from tests.unit.scheduler.beams.test_beam_search import make_group
from tests.unit.scheduler.core.stories.test_properties import check
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_request, make_scheduler

WINDOWS = (CacheGroup("full"), CacheGroup("window", window=6), CacheGroup("window", window=13))
CHECK_EVERY_STEPS = 50
MAX_OPEN = 60


def draw(generator: random.Random, number: int) -> list[Request]:
    """The sequences of a random request: one, a fork of two or three, or, rarely, a beam search."""
    prompt = [generator.randrange(10, 13) for _ in range(generator.randrange(1, 30))]
    if generator.random() < 0.02:
        return make_group(str(number), prompt, n=2, beam_width=2, max_tokens=5)
    tenant, max_tokens = str(number % 3), generator.randrange(1, 25)
    sequences = [
        make_request(str(number), prompt, max_tokens=max_tokens, index=index, tenant=tenant)
        for index in range(generator.choice([1, 1, 1, 2, 3]))
    ]
    for sequence in sequences[1:]:
        sequence.leader = sequences[0]
    return sequences


STATES = (CacheGroup("full"), CacheGroup("recurrent"), CacheGroup("window", window=6))


@pytest.mark.parametrize(
    ("num_requests", "groups", "num_blocks"), [(10_000, ONE_GROUP, 24), (3_000, WINDOWS, 56), (3_000, STATES, 40)]
)
def test_thousands_of_requests_with_aborts_lose_and_leak_nothing(
    num_requests: int, groups: tuple[CacheGroup, ...], num_blocks: int
) -> None:
    generator = random.Random(7)
    scheduler = make_scheduler(
        groups=groups,
        num_blocks=num_blocks,
        max_model_len=60,
        max_num_seqs=8,
        num_host_blocks=40,
        num_snapshots=9,
        num_host_snapshots=20,
        policy="fair",
        preemption_mode="swap",
    )
    worker = PretendWorker(groups=groups)
    open_requests: list[list[Request]] = []
    in_flight: list[SchedulerOutput] = []
    num_submitted = num_aborted = num_steps = 0
    while num_submitted < num_requests or open_requests:
        while num_submitted < num_requests and len(open_requests) < MAX_OPEN:
            open_requests.append(draw(generator, num_submitted))
            num_submitted += 1
            for sequence in open_requests[-1]:
                scheduler.add(sequence)
        if open_requests and generator.random() < 0.2:
            num_aborted += 1
            for sequence in open_requests.pop(generator.randrange(len(open_requests))):
                if not sequence.is_finished:
                    scheduler.finish(sequence)
        while len(in_flight) < 2 and (output := scheduler.schedule()) is not None:
            in_flight.append(output)
        if in_flight:
            scheduler.update(worker.execute(in_flight.pop(0)))
            num_steps += 1
        if num_steps % CHECK_EVERY_STEPS == 0:
            check(scheduler)
        for sequences in [sequences for sequences in open_requests if all(s.is_finished for s in sequences)]:
            open_requests.remove(sequences)
            for sequence in sequences if sequences[0].beam_group is None else []:
                count = sequence.max_num_tokens - sequence.num_prompt_tokens
                assert sequence.output_token_ids == expected_output(sequence.prompt_token_ids, count)
    while in_flight:
        scheduler.update(worker.execute(in_flight.pop(0)))
    check(scheduler)
    assert not scheduler.has_unfinished_requests
    assert scheduler.kv.pool.num_used_blocks == 0
    assert num_aborted > num_requests // 10
    assert scheduler.num_preemptions > 0
