"""What a call asks the engine for, what it resumes, what it gives back, and when it waits."""

import asyncio
import logging
import random
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.engine.stream import AdoptedRequest, AdoptedSequence, EngineRequest, Known
from pagoda_common.errors import NotReady, PagodaError, QueueFull
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import SequenceDelta, TokenLogprobs
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_frontend.budget.caller import current_hold, held_bytes
from pagoda_frontend.openai.protocol import ChatMessage
from pagoda_frontend.requests import run as run_module
from pagoda_frontend.requests.call_context import begin_call
from pagoda_frontend.requests.event_ids import Place
from pagoda_frontend.requests.prompts import template_message
from pagoda_frontend.requests.resume import Resumption, resumption_at
from pagoda_frontend.requests.run import CollectedSequence, Run, start_run
from pagoda_frontend.serving.serving import Serving


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
    """Records what was refused, and how requests ended."""

    def __init__(self) -> None:
        self.rejections: list[str] = []
        self.timed: list[dict[str, Any]] = []
        self.outcomes: list[str] = []

    def timer(self, **facts: Any) -> Any:
        self.timed.append(facts)
        return SimpleNamespace(add=lambda deltas: None, close=self.outcomes.append)

    def count_rejection(self, message: str) -> None:
        self.rejections.append(message)


def serving_of(engine: Engine, metrics: Metrics | None = None, **config: Any) -> Serving:
    return Serving(
        config=FrontendConfig(**config), engine=cast("Any", engine), metrics=cast("Any", metrics or Metrics())
    )


def adopted(number: int, *, seed: int = 0, timeout_s: float = 0.0, lora: LoraAdapter | None = None) -> AdoptedRequest:
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
        lora=lora,
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
    loras = [LoraAdapter(name="a", path=f"/{number}", version=number) for number in range(3)]
    requests = tuple(
        adopted(number, seed=10 + number, timeout_s=number + 0.5, lora=loras[number]) for number in range(3)
    )
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
    assert [request.lora for request in sent] == loras, "the versions that the stream began with"
    assert [request.adopted for request in sent] == list(requests)


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
    assert metrics.outcomes == ["error"]


class Endless:
    """A stream that ends only when it is closed."""

    is_finished = False

    def __init__(self, **_: Any) -> None:
        self.is_closed = False

    async def get(self) -> list[SequenceDelta]:
        await asyncio.sleep(0)
        return [SequenceDelta(0, "a", [1], 0, num_output_tokens=1)]

    def close(self) -> None:
        self.is_closed = True


async def test_a_call_whose_reader_leaves_is_an_abort_and_closes_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Endless] = []

    def opened(**facts: Any) -> Endless:
        streams.append(Endless(**facts))
        return streams[-1]

    monkeypatch.setattr(run_module, "TextStream", opened)
    metrics = Metrics()
    async with aclosing(run_of(serving_of(Engine(), metrics), prompts=1).deltas()) as stream:
        await anext(stream)
        assert metrics.outcomes == []
    assert (metrics.outcomes, [one.is_closed for one in streams]) == (["abort"], [True])
    assert metrics.timed == [{"num_prompt_tokens": 1, "n": 2, "max_tokens": 16}]


def test_the_memory_of_a_request_is_free_once_it_is_admitted() -> None:
    serving = serving_of(Engine())
    hold = serving.held_memory.begin()
    token = current_hold.set(hold)
    try:
        hold.add(1000)
        model = cast("Any", SimpleNamespace(only_pools=False, lora=None, max_model_len=9, vocab_size=9))
        call, params = begin_call("mine", created=100), SamplingParams()
        start_run(call, serving=serving, model=model, prompts=[[1]], params=params, field="prompt")
        assert (hold.num_bytes, serving.held_memory.num_bytes, held_bytes()) == (0, 0, 1000)
    finally:
        current_hold.reset(token)


@pytest.mark.parametrize(("num_top", "num_each"), [(0, 1), (20, 21), (-1, 10)])
async def test_log_probabilities_of_prompts_are_counted_before_they_are_computed(num_top: int, num_each: int) -> None:
    engine = Engine()
    serving = serving_of(engine)
    hold = serving.held_memory.begin()
    token = current_hold.set(hold)
    try:
        model = cast("Any", SimpleNamespace(only_pools=False, lora=None, vocab_size=9, tokenizer=None, names=("m",)))
        params = [SamplingParams(prompt_logprobs=num_top)] * 2
        run = Run(
            begin_call("mine", created=1), serving=serving, model=model, prompts=[[1, 2], [3]], sampling_params=params
        )
        with pytest.raises(NotReady):
            await run.collect()
        assert hold.num_bytes == 3 * (256 + 8 * num_each)
        hold.release()
        hold.add(serving.config.max_unadmitted_bytes // 2 - 3 * 256)
        engine.submitted.clear()
        with pytest.raises(QueueFull, match="requests before admission and answers hold"):
            await run.collect()
        assert engine.submitted == []
    finally:
        current_hold.reset(token)


def test_log_probabilities_and_tokens_of_large_calls_are_counted_while_they_are_kept() -> None:
    serving = serving_of(Engine())
    hold = serving.held_memory.begin()
    token = current_hold.set(hold)
    positions = [TokenLogprobs([1, 2], [-1.0, -2.0], 1), TokenLogprobs([1], [-1.0], 1)]
    try:
        for logprobs in (None, []):
            run_module.hold_kept(SequenceDelta(0, "", [7, 8], 0, logprobs=logprobs), num_sequences=16)
        assert hold.num_bytes == 0, "the tokens of so few sequences are bounded by what runs at a time"
        run_module.hold_kept(SequenceDelta(0, "", [7, 8], 0, logprobs=positions), num_sequences=16)
        assert hold.num_bytes == 2 * 256 + 3 * 8
        run_module.hold_kept(SequenceDelta(0, "", [7, 8], 0), num_sequences=17)
        assert hold.num_bytes == 2 * 256 + 3 * 8 + 2 * 100
    finally:
        current_hold.reset(token)
    run_module.hold_kept(SequenceDelta(0, "", [1], 0, logprobs=positions), num_sequences=1)  # of a call not counted


@pytest.mark.parametrize(("max_log_len", "shown"), [(None, "'one two'"), (3, "'one'"), (0, "''")])
async def test_a_prompt_is_logged_up_to_a_bound_and_only_for_debugging(
    max_log_len: int | None, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    serving = serving_of(Engine(), enable_log_requests=True, max_log_len=max_log_len)
    run = run_of(serving, prompts=1)
    run.model = cast("Any", SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda *_, **__: "one two")))
    for level, has_prompt in ((logging.INFO, False), (logging.DEBUG, True)):
        caplog.clear()
        with caplog.at_level(level, logger=run_module.__name__), pytest.raises(NotReady):
            await run.collect()
        texts = [record.getMessage() for record in caplog.records]
        assert texts[0].startswith(f"received request {run.call.engine_id}: 1 prompt tokens, SamplingParams(")
        assert texts[1:] == [f"request {run.call.engine_id} has the prompt {shown}"] * has_prompt


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
