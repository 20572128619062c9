"""Random loads over models of every kind of layers, under random options: the right tokens, and nothing is leaked."""

import random
from typing import Any

import pytest

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import SchedulerOutput
from pagoda_scheduler.kv.cache_group import CacheGroup
from tests.unit.scheduler.core.stories.test_endurance import draw
from tests.unit.scheduler.core.stories.test_properties import check
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_scheduler

NUM_REQUESTS = 120
MAX_OPEN = 25
FULL, RECURRENT = CacheGroup("full"), CacheGroup("recurrent")


def window(num_tokens: int) -> CacheGroup:
    return CacheGroup("window", window=num_tokens)


SHAPES = [
    (FULL, RECURRENT),
    (RECURRENT,),
    (FULL, window(6), window(1)),
    (RECURRENT, window(7), FULL),
    (window(5),),
    (window(9), RECURRENT),
]


class Story:
    """One load: requests come, are aborted, parked and failed, caches are reset; at the end all is right."""

    def __init__(self, seed: int, groups: tuple[CacheGroup, ...]) -> None:
        self.generator = random.Random(seed)
        self.scheduler = make_scheduler(**self.options(groups))
        self.worker = PretendWorker(groups=groups, guess=lambda most: (most, self.generator.randint(0, most)))
        self.open: list[list[Request]] = []
        self.in_flight: list[SchedulerOutput] = []
        self.num_drawn = 0
        self.most_in_flight = self.generator.choice([1, 2, 3])

    def options(self, groups: tuple[CacheGroup, ...]) -> dict[str, Any]:
        choice = self.generator.choice
        return {
            "groups": groups,
            "num_blocks": choice([18, 24, 40]) * max(1, sum(group.has_blocks for group in groups)),
            "max_model_len": 60,
            "max_num_seqs": choice([3, 8]),
            "num_host_blocks": choice([0, 5, 40]),
            "policy": choice(["fcfs", "fair", "priority"]),
            "preemption_mode": "swap",
            "num_snapshots": choice([0, 2, 5, 9, 40]),
            "num_host_snapshots": choice([0, 3, 20]),
            "snapshot_interval": choice([4, 8, 12, 100]),
            "enable_prefix_caching": choice([True, True, True, False]),
            "num_speculative_tokens": choice([0, 0, 2]),
            "max_num_batched_tokens": choice([6, 17, 64]),
        }

    def run(self) -> Scheduler:
        while self.num_drawn < NUM_REQUESTS or self.open:
            while self.num_drawn < NUM_REQUESTS and len(self.open) < MAX_OPEN:
                self.open.append(draw(self.generator, self.num_drawn))
                self.num_drawn += 1
                for sequence in self.open[-1]:
                    self.scheduler.add(sequence)
            self.disturb()
            while len(self.in_flight) < self.most_in_flight and (output := self.scheduler.schedule()) is not None:
                self.in_flight.append(output)
            self.receive()
            check(self.scheduler)
            self.end()
        while self.in_flight:
            self.receive()
        check(self.scheduler)
        return self.scheduler

    def receive(self) -> None:
        if self.in_flight:
            self.scheduler.update(self.worker.execute(self.in_flight.pop(0)))

    def disturb(self) -> None:
        """Something that users, readers, operators or a worker may do."""
        scheduler, generator, event = self.scheduler, self.generator, self.generator.random()
        for sequence in list(scheduler.parked):
            if generator.random() < 0.3:
                scheduler.unpark(sequence)
        if not self.open:
            return
        sequences = generator.choice(self.open)
        if event < 0.15:
            self.open.remove(sequences)
            for sequence in sequences:
                if not sequence.is_finished:
                    scheduler.finish(sequence)
        elif event < 0.2:
            for sequence in sequences:
                scheduler.park(sequence)
        elif event < 0.21:
            scheduler.kv.reset_cache()
        elif event < 0.22:
            self.worker.bad.add(f"{sequences[0].request_id}/0")

    def end(self) -> None:
        for sequences in [each for each in self.open if all(sequence.is_finished for sequence in each)]:
            self.open.remove(sequences)
            for sequence in sequences:
                if sequence.beam_group is None and sequence.error is None:
                    count = sequence.max_num_tokens - sequence.num_prompt_tokens
                    assert sequence.output_token_ids == expected_output(sequence.prompt_token_ids, count)


@pytest.mark.parametrize("groups", SHAPES, ids=lambda groups: "-".join(group.kind for group in groups))
def test_whatever_happens_every_query_finds_its_own(groups: tuple[CacheGroup, ...]) -> None:
    for seed in range(4):
        scheduler = Story(seed, groups).run()
        assert not scheduler.has_unfinished_requests
        assert scheduler.kv.pool.num_used_blocks == 0
        if scheduler.kv.states is not None:
            assert not scheduler.kv.states.snapshots._holders
