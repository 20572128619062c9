"""Which sequences run with which LoRA adapters, and which adapters the workers have."""

import pytest

from pagoda_common.errors import ModelLoadError, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.adapters.adapter_pool import PATIENCE, AdapterPool
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput
from tests.unit.scheduler.stories import make_scheduler


def adapter(name: str, version: int = 0) -> LoraAdapter:
    return LoraAdapter(name=name, path=f"/adapters/{name}", version=version)


def request(request_id: str, lora: LoraAdapter | None, *, max_tokens: int = 8) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=range(1, 20),
        sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, seed=0),
        max_model_len=100,
        lora=lora,
    )


def scheduler_of(max_loras: int = 2, max_cpu_loras: int = 2) -> Scheduler:
    return make_scheduler(adapters=AdapterPool(max_loras=max_loras, max_cpu_loras=max_cpu_loras))


def load_all(scheduler: Scheduler) -> list[tuple[int, str]]:
    """What the scheduler wants to have read is read."""
    assert scheduler.adapters is not None
    loads = scheduler.adapters.take_loads()
    for _, lora in loads:
        scheduler.adapters.loaded(lora)
    return [(number, lora.name) for number, lora in loads]


def answer(scheduler: Scheduler, output: SchedulerOutput | None) -> None:
    assert output is not None
    scheduler.update(ModelRunnerOutput(step=output.step, num_sampled_tokens=None, token_ids=[5] * len(output.slots)))


def run(scheduler: Scheduler) -> SchedulerOutput | None:
    """The next step, when everything that it lacks was read."""
    output = scheduler.schedule()
    if load_all(scheduler) and output is None:
        output = scheduler.schedule()
    return output


def names(output: SchedulerOutput | None) -> list[str]:
    return [] if output is None else [new.request_id for new in output.new_requests]


def test_a_sequence_waits_for_its_adapter_and_lets_others_pass() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", adapter("x")))
    scheduler.add(request("b", None))
    output = scheduler.schedule()
    assert names(output) == ["b/0"]
    assert load_all(scheduler) == [(1, "x")]
    answer(scheduler, output)
    output = scheduler.schedule()
    assert output is not None
    assert [(new.request_id, new.lora_number) for new in output.new_requests] == [("a/0", 1)]


def test_no_more_adapters_than_allowed_run_in_a_step() -> None:
    scheduler = scheduler_of(max_loras=2, max_cpu_loras=4)
    for name in ("x", "y", "z", "x"):
        scheduler.add(request(f"{name}{len(scheduler.waiting)}", adapter(name)))
    assert scheduler.schedule() is None
    assert [name for _, name in load_all(scheduler)] == ["x", "y", "z"]
    output = scheduler.schedule()
    assert names(output) == ["x0/0", "y1/0", "x3/0"]


def test_the_least_recently_used_adapter_goes_with_a_step() -> None:
    scheduler = scheduler_of(max_loras=1, max_cpu_loras=2)
    for name in ("x", "y", "z"):
        scheduler.add(request(name, adapter(name), max_tokens=1))
        output = run(scheduler)
        assert names(output) == [f"{name}/0"]
        answer(scheduler, output)
        assert output is not None
        assert list(output.loras_to_remove) == ([1] if name == "z" else [])


def test_an_adapter_that_runs_or_is_pinned_stays() -> None:
    scheduler = scheduler_of(max_loras=2, max_cpu_loras=2)
    assert scheduler.adapters is not None
    scheduler.adapters.pin(adapter("pinned"), is_pinned=True)
    load_all(scheduler)
    scheduler.add(request("x", adapter("x")))
    answer(scheduler, run(scheduler))
    scheduler.add(request("z", adapter("z")))
    answer(scheduler, scheduler.schedule())
    assert load_all(scheduler) == []
    scheduler.adapters.pin(adapter("pinned"), is_pinned=False)
    answer(scheduler, scheduler.schedule())
    assert load_all(scheduler) == [(3, "z")]


def test_an_adapter_that_cannot_be_read_fails_those_who_wait_for_it() -> None:
    scheduler = scheduler_of()
    bad, good = request("bad", adapter("x")), request("good", adapter("y"))
    scheduler.add(bad)
    scheduler.add(good)
    assert scheduler.schedule() is None
    error = ModelLoadError("no such file")
    assert scheduler.fail_adapter(adapter("x"), error) == [bad]
    assert bad.error is error
    assert bad.is_finished
    load_all(scheduler)
    assert names(scheduler.schedule()) == ["good/0"]


def test_versions_of_a_name_are_adapters_of_their_own() -> None:
    scheduler = scheduler_of(max_loras=2, max_cpu_loras=2)
    scheduler.add(request("old", adapter("x", 1)))
    scheduler.add(request("new", adapter("x", 2)))
    scheduler.schedule()
    assert load_all(scheduler) == [(1, "x"), (2, "x")]
    output = scheduler.schedule()
    assert output is not None
    assert [new.lora_number for new in output.new_requests] == [1, 2]


def test_a_prefix_is_found_by_the_same_adapter_alone() -> None:
    scheduler = scheduler_of(max_loras=4, max_cpu_loras=4)
    for place, lora in enumerate((adapter("x"), adapter("x"), adapter("x", 1), None)):
        scheduler.add(request(str(place), lora, max_tokens=1))
        output = run(scheduler)
        answer(scheduler, output)
        assert output is not None
        found = output.new_requests[0].num_computed_tokens
        assert (found > 0) == (place == 1), place


def test_whoever_waits_for_a_place_is_not_passed_for_ever() -> None:
    scheduler = scheduler_of(max_loras=1, max_cpu_loras=2)
    scheduler.add(request("x", adapter("x"), max_tokens=2))
    scheduler.schedule()
    load_all(scheduler)
    output = scheduler.schedule()
    scheduler.add(request("patient", adapter("y"), max_tokens=2))
    started = 0
    for number in range(2 * PATIENCE):
        scheduler.add(request(f"x{number}", adapter("x"), max_tokens=2))
        answer(scheduler, output)
        output = scheduler.schedule()
        load_all(scheduler)
        started += sum(name.startswith("x") for name in names(output))
        if "patient/0" in names(output):
            break
        if output is None:
            output = scheduler.schedule()
    else:
        raise AssertionError("it never ran")
    assert started <= PATIENCE + 1


def test_workers_without_adapters_are_given_no_sequence_with_one() -> None:
    scheduler = make_scheduler()
    with pytest.raises(PagodaError, match="lora is 'x', but the worker does not support adapters: upgrade"):
        scheduler.admission.check([request("a", adapter("x"))])
    scheduler.admission.check([request("a", None)])
    scheduler_of().admission.check([request("a", adapter("x"))])
