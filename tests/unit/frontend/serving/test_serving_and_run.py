"""A frontend's state, and what a call asks of the engine field by field, with an engine that is only asked."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import DeadlineExceeded, InvalidRequest, NotFound, NotReady, RequestTooLong
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import HypothesisLogprobs, SequenceDelta, TokenLogprobs
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_frontend.budget.caller import caller
from pagoda_frontend.requests.call_context import begin_call
from pagoda_frontend.requests.run import CollectedSequence, Run, _drop_output, start_run
from pagoda_frontend.serving import serving as servings
from pagoda_frontend.serving.serving import Serving

STYLE = LoraAdapter(name="style", path="p", version=3)


class Engine:
    """Ready by default; records its calls."""

    def __init__(self) -> None:
        self.is_ready, self.is_sleeping, self.not_ready_reason = True, False, "loading"
        self.lost_for_s: float | None = None
        self.loras: dict[str, LoraAdapter] = {"style": STYLE}
        self.looked_for: list[str] = []
        self.waited: list[float | None] = []
        self.released: list[str] = []

    async def resolve_lora(self, name: str) -> None:
        self.looked_for.append(name)

    async def wait_until_ready(self, timeout_s: float | None = None) -> None:
        self.waited.append(timeout_s)
        if not self.is_ready:
            raise NotReady("still away")

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def made(engine: Engine | None = None, *, has_model: bool = True, **config: Any) -> Serving:
    serving = Serving(
        config=FrontendConfig(**config), engine=cast("Any", engine or Engine()), metrics=cast("Any", None)
    )
    if has_model:
        serving._model = cast("Any", MODEL)
    return serving


def model(**fields: Any) -> Any:
    given = {"names": ("m", "alias"), "lora": None, "only_pools": False, "pooling_tasks": ("embed",)}
    return SimpleNamespace(**given | {"vocab_size": 100, "max_model_len": 20, "tokenizer": None} | fields)


MODEL = model()


@pytest.mark.parametrize(
    ("keys", "isolation", "salt"),
    [
        ((), "auto", "mine"),
        (("k",), "auto", "mine"),
        (("k", "k"), "auto", "mine"),
        (("k", "l"), "auto", "t/mine"),
        ((), "tenant", "t/mine"),
        (("k", "l"), "none", "mine"),
    ],
)
def test_tenants_are_kept_apart_in_the_cache(keys: tuple[str, ...], isolation: Any, salt: str) -> None:
    serving = made(api_key=keys, prefix_cache_isolation=isolation)
    assert serving.cache_salt("mine", tenant="t") == salt
    assert serving.cache_salt("mine", tenant="") == "mine"
    assert serving.has_api_keys is bool(keys)


@pytest.mark.parametrize(
    ("fields", "has_model", "is_draining", "is_ready"),
    [
        ({}, True, False, True),
        ({}, False, False, False),
        ({}, True, True, False),
        ({"is_ready": False}, True, False, False),
        ({"is_ready": False, "lost_for_s": 29.9}, True, False, True),
        ({"is_ready": False, "lost_for_s": 30.0}, True, False, False),
        ({"is_ready": False, "lost_for_s": 1.0}, False, False, False),
        ({"is_ready": False, "lost_for_s": 1.0}, True, True, False),
    ],
)
def test_it_is_ready_with_a_model_and_an_engine(
    fields: dict[str, Any], has_model: bool, is_draining: bool, is_ready: bool
) -> None:
    engine = Engine()
    vars(engine).update(fields)
    serving = made(engine, has_model=has_model)
    serving.is_draining = is_draining
    assert (serving.is_ready, serving.has_been_ready) == (is_ready, has_model)


def test_why_it_is_not_ready() -> None:
    engine = Engine()
    serving = made(engine, has_model=False)
    assert serving.not_ready_reason == "the tokenizer is loading"
    serving._why_not = "no such file"
    assert serving.not_ready_reason == "no such file"
    engine.is_ready = False
    assert serving.not_ready_reason == "loading"
    engine.not_ready_reason = ""
    assert serving.not_ready_reason == "the engine is starting"
    serving.is_draining = True
    assert serving.not_ready_reason == "the frontend is shutting down"
    with pytest.raises(NotReady, match="shutting down") as caught:
        _ = serving.model
    assert caught.value.retry_after_s == 1.0
    ready = made()
    assert (ready.not_ready_reason, ready.model) == ("", MODEL)
    ready.is_draining = True
    with pytest.raises(NotReady):
        _ = ready.model


def test_a_model_has_its_names_and_those_of_its_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pagoda_frontend.serving.serving.replace", lambda one, **changes: SimpleNamespace(**vars(one) | changes)
    )
    serving = made()
    for name in (None, "", "m", "alias"):
        assert serving.model_named(name) is MODEL
    assert serving.model_named("style").lora == STYLE
    with pytest.raises(NotFound, match=r"The model `other` does not exist\.") as caught:
        serving.model_named("other")
    assert caught.value.field == "model"


async def test_an_adapter_is_looked_for_by_a_name_that_nothing_has() -> None:
    engine = Engine()
    serving = made(engine)
    for name in (None, 5, "", "m", "alias", "style", "x" * 513):
        await serving.look_for(name)
    assert engine.looked_for == []
    for name in ("other", "x" * 512):
        await serving.look_for(name)
    assert engine.looked_for == ["other", "x" * 512]
    await made(engine, has_model=False).look_for("other")
    assert len(engine.looked_for) == 2


async def test_it_is_idle_when_no_request_and_no_call_is_open() -> None:
    serving = made()
    assert serving.is_idle
    serving.begin_call()
    waiting = asyncio.create_task(serving.wait_until_idle())
    await asyncio.sleep(0)
    with serving.open_request("a", ["a-1"], tenant="t"):
        assert (serving.num_open, serving.num_calls, serving.num_requests) == (1, 1, 1)
        assert serving.is_open("a", tenant="t")
        assert not serving.is_open("a", tenant="u")
        serving.end_call()
        await asyncio.sleep(0)
        assert (serving.is_idle, waiting.done()) == (False, False)
    await waiting
    assert (serving.num_open, serving.num_calls, serving.num_requests, serving.is_idle) == (0, 0, 1, True)


@pytest.mark.parametrize(
    ("timeout_s", "waited", "error", "message"),
    [
        (0.0, 30.0, NotReady, "still away"),
        (5.0, 5.0, DeadlineExceeded, "the request was not finished within 5 s: loading"),
        (30.0, 30.0, NotReady, "still away"),
        (99.0, 30.0, NotReady, "still away"),
    ],
)
async def test_a_request_waits_for_a_lost_engine(
    timeout_s: float, waited: float, error: type[Exception], message: str
) -> None:
    engine = Engine()
    engine.is_ready = False
    with pytest.raises(error, match=message) as caught:
        await made(engine).wait_for_recovery(timeout_s)
    assert engine.waited == [waited]
    if error is NotReady:
        assert cast("NotReady", caught.value).retry_after_s == 1.0
    for name in ("is_ready", "is_sleeping"):
        there = Engine()
        there.is_ready = False
        setattr(there, name, True)
        await made(there).wait_for_recovery(timeout_s)
        assert there.waited == []


def run_of(
    *, prompts: int = 1, n: int = 1, serving: Serving | None = None, note: bytes = b"", of: Any = None, **more: Any
) -> Run:
    call = begin_call("mine", created=100, tenant="t", priority=-2, timeout_s=50.0)
    return Run(
        call.noting("{}", path="/p") if note else call,
        serving=serving or made(),
        model=of or MODEL,
        prompts=[[7] * (place + 1) for place in range(prompts)],
        sampling_params=[SamplingParams(n=n, max_tokens=place + 3) for place in range(prompts)],
        **more,
    )


def requests_of(run: Run) -> list[EngineRequest]:
    return run._requests


def test_every_field_of_a_request_to_the_engine() -> None:
    token = caller.set("1.2.3.4")
    try:
        run = run_of(cache_salt="salt", of=model(lora=STYLE), serving=made(prefix_cache_isolation="tenant"))
    finally:
        caller.reset(token)
    [request] = requests_of(run)
    assert request == EngineRequest(
        request_id=run.call.engine_id,
        prompt_token_ids=[7],
        sampling_params=SamplingParams(n=1, max_tokens=3),
        priority=-2,
        cache_salt="t/salt",
        timeout_s=50.0,
        tenant="t",
        client="1.2.3.4",
        lora=STYLE,
    )


def test_requests_of_several_prompts_are_numbered_and_take_turns() -> None:
    search = BeamSearchParams(beam_width=2)
    run = run_of(prompts=2, n=2, beam_search=search)
    first, second = requests_of(run)
    base = run.call.engine_id
    assert (first.request_id, second.request_id) == (f"{base}-0", f"{base}-1")
    assert (first.group, second.group) == (base, base)
    assert (first.prompt_token_ids, second.prompt_token_ids) == ([7], [7, 7])
    assert (first.sampling_params.max_tokens, second.sampling_params.max_tokens) == (3, 4)
    assert (first.beam_search, second.beam_search) == (search, search)
    assert (run.n, run.num_sequences, run.num_prompt_tokens) == (2, 4, 3)
    assert (run.num_output_tokens, run.num_cached_tokens, run.prompt_logprobs) == (0, 0, [None, None])


def test_prompts_may_be_pooled_alike_or_each_in_its_way() -> None:
    one, other = PoolingParams(task="embed"), PoolingParams(task="score")
    assert [request.pooling for request in requests_of(run_of(prompts=2, pooling=one))] == [one, one]
    assert [request.pooling for request in requests_of(run_of(prompts=2, pooling=[one, other]))] == [one, other]
    assert requests_of(run_of())[0].pooling is None
    only_pools = model(only_pools=True, pooling_tasks=("embed", "score"))
    with pytest.raises(InvalidRequest, match="the model does not generate text: it can embed, score") as caught:
        run_of(of=only_pools)
    assert caught.value.field == "model"
    run_of(of=only_pools, pooling=one)


@pytest.mark.parametrize(("n", "has_ids"), [(1, True), (32, True), (33, False)])
def test_a_stream_of_up_to_64_sequences_may_be_resumed(n: int, has_ids: bool) -> None:
    engine = Engine()
    run = run_of(prompts=2, n=n, note=b"x", serving=made(engine))
    assert (run.event_ids is not None) is has_ids
    first, second = requests_of(run)
    assert (first.resume_key, second.resume_key) == (("mine", "mine") if has_ids else ("", ""))
    assert (bool(first.note), bool(second.note)) == (has_ids, False)
    run.release()
    assert len(engine.released) == (2 if has_ids else 0)
    if run.event_ids is not None:
        run.note_place(cast("Any", SimpleNamespace(index=1, num_output_tokens=4, finish_reason=None)))
        assert run.event_ids.line().startswith(b"id: mine:0,4" if n == 1 else b"id: mine:0,4,0")
    plain = run_of(note=b"")
    assert (plain.event_ids, requests_of(plain)[0].resume_key) == (None, "")


def entry(num: int) -> TokenLogprobs:
    return TokenLogprobs(list(range(num)), [-1.0] * num, 1)


def test_what_a_call_has_used() -> None:
    run = run_of(prompts=2)
    run._num_output_tokens, run._num_cached_tokens = [4, 5], [1, 2]
    assert run.usage() == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    detailed = run_of(serving=made(enable_prompt_tokens_details=True))
    assert detailed.usage()["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (run.num_output_tokens, run.num_cached_tokens) == (9, 3)
    assert run.answer_bytes == 32 * 9
    run.prompt_logprobs = [[None, entry(2), entry(3), None], None]
    assert run.answer_bytes == 32 * (9 + 4 * 3), "as many as the last one has"
    run.prompt_logprobs = [[None], []]
    assert run.answer_bytes == 32 * (9 + 1)
    requests_of(run)[0].sampling_params.logprobs = 4
    assert run.answer_bytes == 32 * (9 * 5 + 1)
    requests_of(run)[0].sampling_params.logprobs = -1
    assert run.answer_bytes == 32 * (9 + 1)


class Playing(Run):
    """A run whose prompts' news are known beforehand."""

    news: dict[str, list[list[SequenceDelta]]]

    async def _generate(self, request: EngineRequest) -> Any:
        for deltas in self.news[request.request_id.removeprefix(self.call.engine_id)]:
            await asyncio.sleep(0)
            yield deltas


def playing(news: dict[str, list[list[SequenceDelta]]], **more: Any) -> Playing:
    call = begin_call("mine", created=100, tenant="t")
    prompts = [[7] * 2] * len(news)
    params = [SamplingParams(n=2)] * len(news)
    serving = made()
    run = Playing(call, serving=serving, model=MODEL, prompts=prompts, sampling_params=params, **more)
    run.news = news
    return run


def delta(index: int, **fields: Any) -> SequenceDelta:
    return SequenceDelta(**{"index": index, "text": "a", "token_ids": [1], "offset": 0} | fields)


async def test_sequences_of_several_prompts_have_places_of_their_own() -> None:
    logprobs = [None, entry(1)]
    run = playing(
        {
            "-0": [
                [delta(0, num_output_tokens=1, num_cached_tokens=3), delta(1, num_output_tokens=1)],
                [delta(0, num_output_tokens=2, finish_reason="stop", prompt_logprobs=logprobs)],
                [delta(1, num_output_tokens=1, token_ids=[], text="", finish_reason="length")],
            ],
            "-1": [[delta(1, num_output_tokens=7, finish_reason="stop", num_cached_tokens=2)], [delta(0, text="b")]],
        }
    )
    sequences = await run.collect()
    assert [(one.index, one.text, one.finish_reason) for one in sequences] == [
        *((0, "aa", "stop"), (1, "a", "length"), (2, "b", None), (3, "a", "stop"))
    ]
    assert (run._num_output_tokens, run._num_cached_tokens) == ([2, 1, 0, 7], [3, 2])
    assert run.prompt_logprobs == [logprobs, None]
    [logged] = run._serving.request_log.ended()
    assert (logged.request_id, logged.tenant, logged.num_prompt_tokens, logged.num_sequences) == ("mine", "t", 4, 4)
    assert logged.num_output_tokens == 10
    assert run._serving.is_idle


async def test_scoring_gives_no_output() -> None:
    run = playing({"": [[delta(0, num_output_tokens=1, finish_reason="stop")]]}, is_scoring=True)
    first, _ = await run.collect()
    assert (first.text, first.token_ids, first.finish_reason, run.num_output_tokens) == ("", [], "length", 0)


def test_what_is_dropped_of_a_scored_prompt() -> None:
    given = delta(0, stop_reason=5, finish_reason="stop", num_output_tokens=1, logprobs=[entry(1)])
    given.token_text_offsets = [0]
    _drop_output(given)
    assert (given.text, given.token_ids, given.token_text_offsets, given.num_output_tokens) == ("", [], [], 0)
    assert (given.logprobs, given.stop_reason, given.finish_reason) == ([], None, "length")
    aborted = delta(0, finish_reason="abort")
    _drop_output(aborted)
    assert (aborted.finish_reason, aborted.logprobs) == ("abort", None)


def test_every_field_of_a_collected_sequence() -> None:
    sequence = CollectedSequence(3)
    hypothesis = HypothesisLogprobs(-1.0, [-1.0], [1])
    embedding: Any = object()
    first = delta(3, logprobs=[entry(1)], num_output_tokens=1, num_cached_tokens=4)
    first.token_text_offsets = [0]
    last = delta(3, text="b", token_ids=[2], logprobs=[entry(2)], finish_reason="stop", stop_reason="END")
    last.token_text_offsets, last.num_output_tokens, last.prompt_logprobs = [1], 2, [None]
    last.hypothesis, last.embedding = hypothesis, embedding
    sequence.add(first)
    sequence.add(last)
    assert (sequence.index, sequence.text, sequence.token_ids) == (3, "ab", [1, 2])
    assert (sequence.logprobs, sequence.token_text_offsets) == ([entry(1), entry(2)], [0, 1])
    assert (sequence.finish_reason, sequence.stop_reason, sequence.num_output_tokens) == ("stop", "END", 2)
    assert (sequence.num_cached_tokens, sequence.prompt_logprobs) == (4, [None])
    assert (sequence.hypothesis, sequence.embedding) == (hypothesis, embedding)


def start(prompts: list[list[int]], params: SamplingParams, **more: Any) -> Run:
    call = begin_call("mine", created=1)
    return start_run(call, serving=made(), model=MODEL, prompts=prompts, params=params, field="prompt", **more)


def test_a_run_begins_with_prompts_that_fit() -> None:
    run = start([[1] * 18, [2]], SamplingParams(max_tokens=5), cache_salt="s")
    assert [request.sampling_params.max_tokens for request in requests_of(run)] == [2, 5]
    assert [request.cache_salt for request in requests_of(run)] == ["s", "s"]
    assert requests_of(start([[1]], SamplingParams()))[0].cache_salt == ""
    assert start([[1]], SamplingParams(), is_scoring=True)._is_scoring
    search = BeamSearchParams(beam_width=3)
    assert requests_of(start([[1]], SamplingParams(n=3), beam_search=search))[0].beam_search == search
    with pytest.raises(RequestTooLong) as caught:
        start([[1], [1] * 20], SamplingParams())
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(("num_prompts", "n", "is_taken"), [(2, 8192, True), (1, 16384, True), (3, 5462, False)])
def test_a_call_has_at_most_16384_sequences(num_prompts: int, n: int, is_taken: bool) -> None:
    prompts = [[1]] * num_prompts
    if is_taken:
        assert start(prompts, SamplingParams(n=n)).num_sequences == num_prompts * n
        return
    with pytest.raises(InvalidRequest, match=f"n times prompts must be at most 16384, got {num_prompts * n}") as caught:
        start(prompts, SamplingParams(n=n))
    assert caught.value.field == "n"


def test_an_answer_cannot_hold_every_log_probability_of_long_prompts() -> None:
    long = model(max_model_len=10**7)
    call = begin_call("mine", created=1)
    with pytest.raises(InvalidRequest, match="prompt_logprobs of 1048578 tokens"):
        start_run(
            call,
            serving=made(),
            model=long,
            prompts=[[1] * 524_289] * 2,
            params=SamplingParams(prompt_logprobs=0),
            field="prompt",
        )


async def test_a_model_that_cannot_be_loaded_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [NotReady("no such model"), ValueError("broken"), model(names=("m", "n"), max_model_len=20)]
    told: list[Any] = []
    serving = made(has_model=False)
    serving.metrics = cast("Any", SimpleNamespace(set_model=lambda **facts: told.append(facts)))

    async def load(config: Any, **given: Any) -> Any:
        assert (config, given) == (
            serving.config,
            {"engine": serving.engine, "work": serving.work, "chat_template": serving.chat_template},
        )
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(time_s: float) -> None:
        told.append((time_s, serving.not_ready_reason, serving.has_been_ready))

    monkeypatch.setattr(servings, "load_served_model", load)
    monkeypatch.setattr(servings.asyncio, "sleep", sleep)
    await serving.start()
    assert serving._loading is not None
    await serving._loading
    assert told == [
        (5.0, "no such model", False),
        (5.0, "the tokenizer cannot be loaded", False),
        {"model_name": "m", "max_model_len": 20},
    ]
    assert (serving.model.names, serving.not_ready_reason) == (("m", "n"), "")
    told_in_log = ["no such model; trying again", "cannot load the tokenizer; trying again"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == told_in_log


async def test_closing_ends_the_loading_and_what_the_model_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def never(config: Any, **given: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("loading")

    def part(name: str) -> Any:
        async def close() -> None:
            ended.append(name)

        return SimpleNamespace(close=close)

    monkeypatch.setattr(servings, "load_served_model", never)
    loading = made(has_model=False)
    await loading.start()
    await asyncio.sleep(0)
    await loading.close()
    assert ended == ["loading"]
    ended.clear()
    serving = made()
    serving._model = model(grammars=part("grammars"), prompts=part("prompts"))
    await serving.close()
    assert ended == ["grammars", "prompts"]
    ended.clear()
    parts = {"work": SimpleNamespace(close=lambda: ended.append("work"))}
    parts["tracer"] = SimpleNamespace(close=lambda: ended.append("tracer"))
    await replace(serving.shared, **cast("Any", parts)).close()
    assert ended == ["work", "tracer"]
