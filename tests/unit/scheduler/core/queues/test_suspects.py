"""Sequences that may be what ends their worker: each is computed alone, a step at a time, whatever else runs."""

import pytest

from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.adapters.adapter_pool import AdapterPool
from pagoda_scheduler.core.quarantine import MAX_CRASHES
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.scheduler import Scheduler
from tests.unit.scheduler.stories import PretendWorker, make_request, make_scheduler, run


def suspect_of(name: str, num_prompt: int = 5, **more: object) -> Request:
    request = make_request(name, list(range(2000, 2000 + num_prompt)), **more)  # type: ignore[arg-type]  # any field
    request.num_crashes = MAX_CRASHES
    return request


def running(scheduler: Scheduler, worker: PretendWorker, *requests: Request) -> None:
    """All of these run, and no step is in flight."""
    for request in requests:
        scheduler.add(request)
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(worker.execute(output))
    assert scheduler.running == list(requests)


def step(scheduler: Scheduler, worker: PretendWorker) -> list[str]:
    """The sequences of one step."""
    output = scheduler.schedule()
    assert output is not None
    names = {new.slot: new.request_id for new in output.new_requests}
    found = [names.get(slot, worker.names.get(slot, "")) for slot in output.slots]
    scheduler.update(worker.execute(output))
    return found


@pytest.mark.parametrize(("num_crashes", "is_alone"), [(MAX_CRASHES - 1, False), (MAX_CRASHES, True)])
def test_after_so_many_losses_a_sequence_runs_alone(num_crashes: int, is_alone: bool) -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    running(scheduler, worker, make_request("a", 9, max_tokens=20, ignore_eos=True))
    suspect = suspect_of("s")
    suspect.num_crashes = num_crashes
    scheduler.add(suspect)
    assert scheduler.has_unfinished_requests
    assert step(scheduler, worker) == (["s/0"] if is_alone else ["a/0", "s/0"])
    assert len(scheduler.quarantine) == 0, "it has a token, and its worker lives"
    assert step(scheduler, worker) == ["a/0", "s/0"]


def test_a_suspect_waits_for_the_steps_in_flight_and_is_alone_in_flight() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    scheduler.add(make_request("a", 9, max_tokens=20))
    first = scheduler.schedule()
    assert first is not None
    scheduler.add(suspect_of("s"))
    assert scheduler.schedule() is None, "both would be blamed"
    scheduler.update(worker.execute(first))
    alone = scheduler.schedule()
    assert alone is not None
    assert [new.request_id for new in alone.new_requests] == ["s/0"]
    assert scheduler.schedule() is None


def test_a_long_prompt_of_a_suspect_is_computed_in_chunks_alone() -> None:
    scheduler, worker = make_scheduler(max_num_batched_tokens=16), PretendWorker()
    running(scheduler, worker, make_request("a", 9, max_tokens=20, ignore_eos=True))
    scheduler.add(suspect_of("s", 37))
    output = scheduler.schedule()
    assert output is not None
    assert output.num_scheduled_tokens == [16]
    scheduler.update(worker.execute(output))
    assert len(scheduler.quarantine) == 1, "it has no token yet"
    assert [step(scheduler, worker) for _ in range(3)] == [["s/0"], ["s/0"], ["a/0", "s/0"]]


def test_a_suspect_takes_a_slot_of_another() -> None:
    scheduler, worker = make_scheduler(max_num_seqs=2), PretendWorker()
    others = [make_request(name, 5, max_tokens=20, ignore_eos=True) for name in "ab"]
    running(scheduler, worker, *others)
    scheduler.add(suspect_of("s"))
    assert step(scheduler, worker) == ["s/0"]
    assert [other.status for other in others] == [RequestStatus.RUNNING, RequestStatus.WAITING], "the last gives way"
    assert others[1].num_preemptions == scheduler.num_preemptions == 1
    run(scheduler, worker)
    assert [len(other.output_token_ids) for other in others] == [20, 20]


@pytest.mark.parametrize("num_prompt", [5, 25])
def test_a_suspect_takes_the_blocks_of_others(num_prompt: int) -> None:
    """At its start, and for a later chunk of its prompt."""
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=20, enable_prefix_caching=False)
    worker = PretendWorker()
    others = [make_request(name, 10, max_tokens=6, ignore_eos=True) for name in "ab"]
    running(scheduler, worker, *others)
    scheduler.add(suspect_of("s", num_prompt, max_tokens=2))
    while scheduler.quarantine:
        assert step(scheduler, worker) == ["s/0"]
    run(scheduler, worker)
    assert [len(other.output_token_ids) for other in others] == [6, 6]


def test_a_suspect_waits_for_its_adapter_but_not_for_a_place() -> None:
    adapters = AdapterPool(max_loras=1, max_cpu_loras=4)
    scheduler, worker = make_scheduler(adapters=adapters), PretendWorker()
    busy, wanted = (LoraAdapter(name=name, path=f"/{name}") for name in ("busy", "wanted"))
    for lora in (busy, wanted):
        adapters.load(lora)
    adapters.take_loads()
    adapters.loaded(busy)
    running(scheduler, worker, make_request("a", 9, max_tokens=20, ignore_eos=True, lora=busy))
    scheduler.add(suspect_of("s", lora=wanted))
    assert scheduler.schedule() is None, "it is being read"
    adapters.loaded(wanted)
    assert step(scheduler, worker) == ["s/0"], "of those in a step it is the only one"


def test_of_two_suspects_the_first_is_tried_first_and_an_end_clears() -> None:
    scheduler = make_scheduler()
    first, second = suspect_of("s"), suspect_of("t", 7)
    for request in (first, second):
        scheduler.add(request)
    assert scheduler.schedule() is not None
    scheduler.finish(first)
    assert list(scheduler.quarantine) == [second]
    assert scheduler.has_unfinished_requests
    scheduler.park(second)
    assert list(scheduler.parked) == [], "others wait for what it does"
    scheduler.finish(second)
    assert (len(scheduler.quarantine), second.status) == (0, RequestStatus.FINISHED)
    scheduler.finish(second)
    assert second.is_finished, "it has ended already"
