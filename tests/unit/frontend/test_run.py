"""What a call asks the engine for, what it resumes, what it gives back, and when it waits."""

import random
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.engine.stream import AdoptedRequest, AdoptedSequence, EngineRequest, Known
from pagoda_common.errors import NotReady, PagodaError, QueueFull
from pagoda_common.params.outputs import SequenceDelta
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_frontend.openai.protocol import ChatMessage
from pagoda_frontend.requests.call_context import begin_call
from pagoda_frontend.requests.event_ids import Place
from pagoda_frontend.requests.prompts import template_message
from pagoda_frontend.requests.resume import Resumption, resumption_at
from pagoda_frontend.requests.run import CollectedSequence, Run
from pagoda_frontend.requests.serving import Serving


class Engine:
    """Refuses every request, and notes what it is asked for."""

    def __init__(self, error: PagodaError | None = None) -> None:
        self.error = error or NotReady("away")
        self.submitted: list[EngineRequest] = []
        self.released: list[str] = []
        self.aborted: list[str] = []
        self.adopted: list[AdoptedRequest] = []
        self.is_ready, self.is_sleeping, self.not_ready_reason = True, False, "why"
        self.falls_asleep = False

    def submit(self, request: EngineRequest) -> Any:
        self.submitted.append(request)
        raise self.error

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def adopt(self, resume_key: str) -> list[AdoptedRequest]:
        return list(self.adopted)

    async def wait_until_ready(self, timeout_s: float | None = None) -> None:
        self.is_sleeping = self.falls_asleep
        raise NotReady(f"not within {timeout_s:g} s")


class Metrics:
    """Counts what was refused."""

    def __init__(self) -> None:
        self.rejections: list[str] = []

    def timer(self, **_: Any) -> Any:
        return SimpleNamespace(add=lambda deltas: None, close=lambda outcome: None)

    def count_rejection(self, message: str) -> None:
        self.rejections.append(message)


def serving_of(engine: Engine, metrics: Metrics | None = None) -> Serving:
    return Serving(config=FrontendConfig(), engine=cast("Any", engine), metrics=cast("Any", metrics or Metrics()))


def adopted(number: int, *, seed: int = 0, timeout_s: float = 0.0) -> AdoptedRequest:
    return AdoptedRequest(
        request_id=f"e-{number}",
        attempt=2,
        prompt_token_ids=[number],
        seed=seed,
        arrival_time_ns=1,
        timeout_s=timeout_s,
        sequences=[AdoptedSequence(token_ids=[]), AdoptedSequence(token_ids=[])],
        note=orjson.dumps({"path": "/p", "created": 5, "body": "{}"}),
        tenant="t",
    )


def run_of(serving: Serving, *, prompts: int = 3, resumption: Resumption | None = None) -> Run:
    call = begin_call("mine", created=100, tenant="t", timeout_s=50.0, resumption=resumption)
    return Run(
        call.noting("{}", path="/p"),
        serving=serving,
        model=cast("Any", SimpleNamespace(tokenizer=None, names=("m",), only_pools=False, lora=None)),
        prompts=[[1]] * prompts,
        sampling_params=[SamplingParams(n=2, seed=77)] * prompts,
    )


async def test_a_resumed_call_goes_on_with_what_each_of_its_requests_was() -> None:
    engine = Engine()
    known = tuple(Known(number, number == 3) for number in range(6))
    requests = tuple(adopted(number, seed=10 + number, timeout_s=number + 0.5) for number in range(3))
    resumption = Resumption(place=Place(key="old", known=known), adopted=requests, note={"created": 5, "path": "/p"})
    run = run_of(serving_of(engine), resumption=resumption)
    assert (run.call.request_id, run.call.created, run.num_prompt_tokens) == ("old", 5, 3)
    with pytest.raises(NotReady, match="away"):
        await run.collect()
    sent = sorted(engine.submitted, key=lambda request: request.request_id)
    assert [request.request_id for request in sent] == ["e-0", "e-1", "e-2"]
    assert [request.prompt_token_ids for request in sent] == [[0], [1], [2]]
    assert [request.sampling_params.seed for request in sent] == [10, 11, 12], "the seeds that were drawn"
    assert [request.timeout_s for request in sent] == [0.5, 1.5, 2.5], "what was left of the time"
    assert [request.known for request in sent] == [known[0:2], known[2:4], known[4:6]]


async def test_requests_of_a_stream_are_in_the_order_of_their_numbers() -> None:
    engine = Engine()
    engine.adopted = [adopted(number) for number in range(12)]
    random.Random(3).shuffle(engine.adopted)
    place = Place(key="k", known=(Known(0),) * 24)
    found = await resumption_at(place, engine=cast("Any", engine), path="/p", tenant="t")
    assert [request.request_id for request in found.adopted] == [f"e-{number}" for number in range(12)]


def test_every_request_of_a_call_is_released() -> None:
    engine = Engine()
    run = run_of(serving_of(engine))
    run.release()
    assert [name.rpartition("-")[2] for name in engine.released] == ["0", "1", "2"]


@pytest.mark.parametrize(("error", "num_counted"), [(QueueFull("full"), 1), (NotReady("away"), 0)])
async def test_only_what_the_queue_refuses_counts_as_a_rejection(error: PagodaError, num_counted: int) -> None:
    metrics = Metrics()
    with pytest.raises(type(error)):
        await run_of(serving_of(Engine(error), metrics), prompts=1).collect()
    assert len(metrics.rejections) == num_counted


def test_cached_tokens_are_told_once_and_stay() -> None:
    sequence = CollectedSequence(0)
    for num_cached_tokens in (0, 5, 0):
        sequence.add(SequenceDelta(0, "", [1], 0, num_cached_tokens=num_cached_tokens))
    assert (sequence.num_cached_tokens, sequence.token_ids) == (5, [1, 1, 1])


def test_two_calls_of_one_name_are_aborted_and_end_apart() -> None:
    engine = Engine()
    serving = serving_of(engine)
    with serving.open_request("a", ["a-1", "a-2"], tenant="t"):
        with serving.open_request("a", ["b-1"], tenant="t"):
            assert serving.abort("a", tenant="t")
        assert sorted(engine.aborted) == ["a-1", "a-2", "b-1"]
        engine.aborted.clear()
        assert not serving.abort("a", tenant="other")
        assert serving.abort("a", tenant="t")
        assert engine.aborted == ["a-1", "a-2"]
    assert not serving.abort("a", tenant="t")
    assert (serving.is_open("a", tenant="t"), serving.is_idle) == (False, True)


async def test_a_request_waits_in_the_queue_of_an_engine_that_falls_asleep() -> None:
    engine = Engine()
    engine.is_ready, engine.falls_asleep = False, True
    await serving_of(engine).wait_for_recovery(0.0)
    engine.is_sleeping = engine.falls_asleep = False
    with pytest.raises(NotReady, match="not within 30 s"):
        await serving_of(engine).wait_for_recovery(0.0)


def test_reasoning_is_shown_to_templates_under_both_names_whichever_is_given() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = ChatMessage.model_validate({"role": "assistant", "content": "x", name: "why"})
        shown = template_message(message, 0)
        assert (shown["reasoning"], shown["reasoning_content"]) == ("why", "why")
