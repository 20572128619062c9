"""What LLM, AsyncLLM and LLMEngine make of their arguments, before and after an engine that is only asked."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda import LLM, AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.llm import async_llm, llm_engine
from pagoda.llm import llm as llm_module
from pagoda.llm.llm_engine import LLMEngine, _Generation
from pagoda.llm.metrics import GenerationCounts
from pagoda.llm.prompts import Prompt
from pagoda.llm.request_output import RequestOutputBuilder
from pagoda.lora.request import LoRARequest
from pagoda.v1 import types_pb2
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError, QueueFull, RequestFailed
from pagoda_common.params.outputs import SequenceDelta, TokenLogprobs
from pagoda_common.params.pooling_params import POOLED
from pagoda_common.text.tokenizer import Tokenizer

INFO = types_pb2.ModelInfo(model="m", vocab_size=3072, max_model_len=40, generation_config_json='{"top_k": 9}')


class Stream:
    """Gives its deltas, one list a time, or fails."""

    def __init__(self, request: EngineRequest, deltas: list[Any]) -> None:
        self.request, self._deltas = request, list(deltas)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.at_least: list[int] = []
        self.num_closed = 0

    @property
    def is_finished(self) -> bool:
        return not self._deltas

    async def get(self, *, at_least: int = 1) -> list[SequenceDelta]:
        self.at_least.append(at_least)
        await asyncio.sleep(0)
        found = self._deltas.pop(0)
        if isinstance(found, Exception):
            raise found
        self.prompt_logprobs = [None]
        return cast("list[SequenceDelta]", found)

    def close(self) -> None:
        self.num_closed += 1


def delta(text: str, *, reason: Any = None, token_id: int = 7) -> list[SequenceDelta]:
    return [SequenceDelta(index=0, text=text, token_ids=[token_id], offset=0, finish_reason=reason)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


class Harness:
    """An LLM without an engine; `script` says what each request gets."""

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        self.llm_async = AsyncLLM(**options)
        self.engine = SimpleNamespace(model_info=INFO, is_sleeping=False, load=types_pb2.EngineLoad())
        self.llm_async._engine, self.llm_async._tokenizer = cast("Any", self.engine), tokenizer
        self.streams: list[Stream] = []
        self.script: Callable[[EngineRequest], list[Any]] = lambda request: [delta("a"), delta("b", reason="stop")]
        self.num_open = self.most_open = 0
        self.llm_async.open = self.open  # type: ignore[method-assign]  # no engine
        made = LLM.__new__(LLM)
        made._async_llm, made._counts, made._enqueued = self.llm_async, GenerationCounts(), []
        made._draw_seed = random.Random(5)
        made._loop = cast("Any", SimpleNamespace(run=asyncio.run))
        self.llm = made

    def open(self, request: EngineRequest) -> Any:
        self.streams.append(Stream(request, self.script(request)))
        return self.streams[-1]

    @property
    def requests(self) -> list[EngineRequest]:
        return [stream.request for stream in self.streams]


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Harness:
    return Harness(tokenizer, address="a:1")


def generate(harness: Harness, prompts: Any, params: Any = None, **options: Any) -> list[Any]:
    return harness.llm.generate(prompts, params, **{"use_tqdm": False} | options)


def test_each_prompt_has_its_parameters_priority_and_adapter(harness: Harness) -> None:
    style, tone = LoRARequest("style", 1, "/s"), LoRARequest("tone", 2, "/t")
    params = [SamplingParams(max_tokens=number, seed=number) for number in (1, 2, 3)]
    outputs = generate(harness, [[5], [6], [7]], params, priority=[3, -1, 0], lora_request=[style, None, tone])
    assert [output.prompt_token_ids for output in outputs] == [[5], [6], [7]]
    sent = sorted(harness.requests, key=lambda request: request.prompt_token_ids)
    assert [request.sampling_params.max_tokens for request in sent] == [1, 2, 3]
    assert [request.sampling_params.seed for request in sent] == [1, 2, 3]
    assert [request.priority for request in sent] == [3, -1, 0]
    assert [request.lora for request in sent] == [style.adapter, None, tone.adapter]
    assert [output.request_id for output in outputs] == [request.request_id for request in sent]
    assert len({request.request_id for request in sent}) == 3


def test_outputs_are_whole_and_counted(harness: Harness) -> None:
    [output] = generate(harness, [5, 6], SamplingParams())
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.finished) == ("ab", [7, 7], True)
    assert output.prompt_logprobs == [None]
    counts = harness.llm._counts
    assert (counts.num_prompt_tokens, counts.num_output_tokens, counts.finish_reasons) == (2, 2, {"stop": 1})
    assert harness.streams[0].at_least == [64, 64]
    assert harness.streams[0].num_closed == 1
    names = {metric.name: metric for metric in harness.llm.get_metrics()}
    assert cast("Any", names["vllm:generation_tokens"]).value == 2
    assert names["vllm:generation_tokens"].labels["model_name"] == "m"


def test_seeds_are_drawn_where_none_is_given(harness: Harness) -> None:
    given = SamplingParams()
    generate(harness, [[5], [6]], given)
    draw = random.Random(5)
    expected = [draw.getrandbits(63) for _ in range(2)]
    assert sorted(request.sampling_params.seed or 0 for request in harness.requests) == sorted(expected)
    assert given.seed is None
    harness.streams.clear()
    generate(harness, [5], SamplingParams(seed=0))
    assert harness.requests[0].sampling_params.seed == 0


def test_without_parameters_the_models_are_taken(harness: Harness) -> None:
    assert harness.llm.get_default_sampling_params() == SamplingParams(top_k=9)
    generate(harness, [5])
    assert harness.requests[0].sampling_params.top_k == 9


def test_options_of_tokenization(harness: Harness, tokenizer: Tokenizer) -> None:
    text = "one two three"
    ids = tokenizer.encode(text)
    generate(harness, text, SamplingParams(max_tokens=3), tokenization_kwargs={"truncate_prompt_tokens": 2})
    generate(harness, text, SamplingParams(max_tokens=3), tokenization_kwargs={})
    assert [request.prompt_token_ids for request in harness.requests] == [ids[-2:], ids]
    with pytest.raises(
        InvalidRequest, match="tokenization_kwargs has 'x', must be add_special_tokens and truncate"
    ) as c:
        generate(harness, text, tokenization_kwargs={"x": 1})
    assert c.value.field == "tokenization_kwargs"


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"params": [SamplingParams()]}, "sampling_params", "sampling_params has 1 entries, there are 2 prompts"),
        ({"priority": [1, 2, 3]}, "priority", "priority has 3 entries, there are 2 prompts"),
        ({"lora_request": [None]}, "lora_request", "lora_request has 1 entries, there are 2 prompts"),
        ({"params": SamplingParams(stop_token_ids=[3072])}, "stop_token_ids", "stop_token_ids has token 3072"),
        (
            {"params": [SamplingParams(), SamplingParams(allowed_token_ids=[3072])]},
            "allowed_token_ids",
            "allowed_token_ids has token 3072",
        ),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_sent(
    harness: Harness, options: dict[str, Any], field: str, message: str
) -> None:
    given = dict(options)
    with pytest.raises(InvalidRequest, match=message) as caught:
        generate(harness, [[5], [6]], given.pop("params", None), **given)
    assert caught.value.field == field
    assert harness.streams == []


def test_a_sleeping_engine_is_not_asked(harness: Harness) -> None:
    harness.engine.is_sleeping = True
    for call in (
        lambda: generate(harness, [5]),
        lambda: harness.llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False),
        lambda: harness.llm.wait_for_completion(use_tqdm=False),
    ):
        with pytest.raises(NotReady, match=r"the model sleeps: call wake_up\(\) first"):
            call()
    assert harness.streams == []


def test_a_request_that_fails_alone_is_an_error_of_its_own(harness: Harness) -> None:
    harness.script = lambda request: (
        [delta("a"), RequestFailed("lost")] if request.prompt_token_ids == [6] else [delta("b", reason="stop")]
    )
    first, second = generate(harness, [[5], [6]], SamplingParams())
    assert (first.outputs[0].finish_reason, second.outputs[0].finish_reason) == ("stop", "error")
    assert (second.outputs[0].text, second.finished) == ("a", True)
    harness.script = lambda request: [QueueFull("full")]
    with pytest.raises(QueueFull, match="full"):
        generate(harness, [[5], [6]], SamplingParams())


def test_no_more_than_the_bound_are_open(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "MAX_OPEN_REQUESTS", 2)
    opened: list[int] = []

    def script(request: EngineRequest) -> list[Any]:
        opened.append(sum(not stream.num_closed for stream in harness.streams) + 1)
        return [delta("a"), delta("b", reason="stop")]

    harness.script = script
    assert len(generate(harness, [[number] for number in range(1, 8)], SamplingParams())) == 7
    assert max(opened) == 2


def test_the_bar_counts_prompts_and_tells_the_speed(harness: Harness) -> None:
    made: list[dict[str, Any]] = []
    told: list[str] = []
    bar = SimpleNamespace(
        format_dict={"elapsed": 2.0},
        set_postfix_str=lambda text, refresh: told.append(f"{text} {refresh}"),
        update=lambda: told.append("update"),
    )

    def make_bar(**options: Any) -> AbstractContextManager[Any]:
        made.append(options)
        return nullcontext(bar)

    generate(harness, [[5], [6]], SamplingParams(), use_tqdm=make_bar)
    assert made == [{"total": 2, "desc": "Processed prompts", "disable": False, "dynamic_ncols": True}]
    assert told == ["1 output tokens/s False", "update", "2 output tokens/s False", "update"]


def test_what_is_enqueued_is_generated_once(harness: Harness) -> None:
    first = harness.llm.enqueue([[5], [6]], SamplingParams(), priority=[1, 2])
    second = harness.llm.enqueue([7], SamplingParams(), lora_request=LoRARequest("style", 1, "/s"))
    assert harness.streams == []
    outputs = harness.llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second
    assert harness.llm.wait_for_completion(use_tqdm=False) == []
    sent = {request.request_id: request for request in harness.requests}
    assert [sent[name].priority for name in first + second] == [1, 2, 0]
    assert sent[second[0]].lora is not None


def test_a_conversation_has_no_special_tokens_but_the_templates(harness: Harness, tokenizer: Tokenizer) -> None:
    template = "{{ mood }}{% for m in messages %}<{{ m.content }}>{% endfor %}{% if tools %}T{% endif %}"
    outputs = harness.llm.chat(
        [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
        SamplingParams(),
        use_tqdm=False,
        chat_template=template + "{% if add_generation_prompt %}G{% endif %}",
        chat_template_kwargs={"mood": "M"},
        tools=[{"type": "function"}],
        add_generation_prompt=False,
        lora_request=LoRARequest("style", 1, "/s"),
    )
    assert [output.prompt for output in outputs] == ["M<a>T", "M<b>T"]
    assert {request.lora.name for request in harness.requests if request.lora} == {"style"}
    expected = tokenizer.encode("M<a>T", add_special_tokens=False)
    assert outputs[0].prompt_token_ids == expected
    [other] = harness.llm.chat(
        [{"role": "user", "content": "a"}],
        use_tqdm=False,
        chat_template="{{ messages[0].content }} is long enough",
        tokenization_kwargs={"truncate_prompt_tokens": 1},
    )
    assert len(other.prompt_token_ids) == 1


def test_a_search_asks_for_its_beams(harness: Harness) -> None:
    harness.script = lambda request: [
        [SequenceDelta(index=index, text="", token_ids=[7], offset=0, finish_reason="length") for index in (0, 1)]
    ]
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    [output] = harness.llm.beam_search([5], params, LoRARequest("style", 1, "/s"))
    assert [sequence.tokens for sequence in output.sequences] == [[5, 7], [5, 7]]
    [request] = harness.requests
    assert (request.beam_search, request.sampling_params) == (params, params.sampling_params())
    assert request.lora is not None
    with pytest.raises(InvalidRequest, match="must be a LoRARequest"):
        harness.llm.beam_search([5], params, "style")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(("include_dp", "size"), [(True, 6), (False, 3)])
def test_the_number_of_workers(tokenizer: Tokenizer, include_dp: bool, size: int) -> None:
    harness = Harness(tokenizer, tensor_parallel_size=3, data_parallel_size=2)
    assert harness.llm.get_world_size(include_dp) == size
    assert harness.llm.get_world_size() == 6


PROMPT = Prompt(text="x", token_ids=[5], cache_salt="salt")


def test_every_field_of_a_request(tokenizer: Tokenizer) -> None:
    llm = Harness(tokenizer, address="a:1").llm_async
    params, search = SamplingParams(max_tokens=3), BeamSearchParams(beam_width=1, max_tokens=3)
    adapter = LoRARequest("style", 1, "/s").adapter
    made = llm.make_request(PROMPT, params, request_id="mine", priority=4, beam_search=search, lora=adapter)
    assert made == EngineRequest(
        request_id="mine",
        prompt_token_ids=[5],
        sampling_params=params,
        priority=4,
        cache_salt="salt",
        beam_search=search,
        lora=adapter,
    )
    first, second = (llm.make_request(PROMPT, params).request_id for _ in range(2))
    assert first.rpartition("-")[0] == second.rpartition("-")[0]
    assert (first.rpartition("-")[2], second.rpartition("-")[2]) == ("0", "1")
    private = Harness(tokenizer).llm_async
    with pytest.raises(InvalidRequest, match="lora_request needs enable_lora=True") as caught:
        private.make_request(PROMPT, params, lora=adapter)
    assert caught.value.field == "lora_request"
    assert Harness(tokenizer, enable_lora=True).llm_async.make_request(PROMPT, params, lora=adapter).lora == adapter


def test_options_of_all_structured_outputs_hold_for_each(tokenizer: Tokenizer) -> None:
    options = {"disable_any_whitespace": True}
    llm = Harness(tokenizer, address="a:1", structured_outputs_config=options).llm_async
    given = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    made = llm.make_request(PROMPT, given).sampling_params.structured_outputs
    assert made == StructuredOutputsParams(regex="a", disable_any_whitespace=True)
    assert given.structured_outputs == StructuredOutputsParams(regex="a"), "what was given stays"
    assert llm.make_request(PROMPT, SamplingParams()).sampling_params.structured_outputs is None


def test_bad_words_that_are_token_ids_are_left_alone(tokenizer: Tokenizer) -> None:
    llm = Harness(tokenizer, address="a:1").llm_async
    given = SamplingParams(bad_words=["dog"], bad_words_token_ids=((1, 2),))
    assert llm.make_request(PROMPT, given).sampling_params.bad_words_token_ids == ((1, 2),)


@pytest.mark.parametrize(("address", "is_refused"), [(None, True), ("a:1", False)])
def test_the_bound_on_log_probabilities_is_that_of_a_private_engine(
    tokenizer: Tokenizer, address: str | None, is_refused: bool
) -> None:
    llm = Harness(tokenizer, address=address, max_logprobs=5).llm_async
    llm.check_params(SamplingParams(logprobs=5))
    if not is_refused:
        llm.check_params(SamplingParams(logprobs=6))
        return
    with pytest.raises(InvalidRequest, match="logprobs is 6, max_logprobs is 5"):
        llm.check_params(SamplingParams(logprobs=6))


def test_prompts_are_made_for_their_task(tokenizer: Tokenizer) -> None:
    llm = Harness(tokenizer, address="a:1").llm_async
    maker = llm.prompt_maker("embed")
    assert (maker.tokenizer, maker.max_model_len, maker.vocab_size, maker.field) == (tokenizer, 40, 3072, "prompts")
    assert (maker.add_special_tokens, maker.truncation, maker.prefix) == (True, None, "")
    assert (maker.max_document_tokens, maker.splits_long, maker.template) == (0, False, None)
    other = llm.prompt_maker("score", truncate_prompt_tokens=3, add_special_tokens=False, max_document_tokens=7)
    assert other.truncation is not None
    assert (other.truncation.num_tokens, other.truncation.side, other.add_special_tokens) == (3, "left", False)
    assert other.max_document_tokens == 7
    long = Harness(tokenizer, address="a:1", pooler_config={"enable_chunked_processing": True}).llm_async
    assert (long.prompt_maker("embed").splits_long, long.prompt_maker("score").splits_long) == (True, False)


async def outputs_of(llm: AsyncLLM, **fields: Any) -> list[Any]:
    return [output async for output in llm.generate([5], SamplingParams(**fields), "mine", priority=3)]


async def test_each_kind_of_output(harness: Harness) -> None:
    harness.script = lambda request: [delta("a"), delta("b"), delta("c", reason="stop")]
    llm = harness.llm_async
    whole = await outputs_of(llm)
    assert [output.outputs[0].text for output in whole] == ["a", "ab", "abc"]
    parts = await outputs_of(llm, output_kind=RequestOutputKind.DELTA)
    assert [output.outputs[0].text for output in parts] == ["a", "b", "c"]
    last = await outputs_of(llm, output_kind=RequestOutputKind.FINAL_ONLY)
    assert [output.outputs[0].text for output in last] == ["abc"]
    assert [stream.at_least for stream in harness.streams] == [[1, 1, 1], [1, 1, 1], [64, 64, 64]]
    assert {(request.request_id, request.priority) for request in harness.requests} == {("mine", 3)}
    assert [output.finished for output in whole] == [False, False, True]
    assert [stream.num_closed for stream in harness.streams] == [1, 1, 1]
    with pytest.raises(InvalidRequest, match="generate takes one prompt, got 2"):
        await anext(llm.generate(cast("Any", [[5], [6]])))


async def test_an_engine_that_is_not_there_says_so() -> None:
    llm = AsyncLLM()
    for call in (lambda: llm.engine, lambda: llm.tokenizer, lambda: llm.model_info):
        with pytest.raises(NotReady, match="the engine is not running: it was not started, or was shut down"):
            call()
    llm._engine = cast("Any", SimpleNamespace(model_info=None, is_ready=False, not_ready_reason="why", aborted=[]))
    with pytest.raises(NotReady, match="the model is not known yet"):
        _ = llm.model_info
    with pytest.raises(NotReady, match="why"):
        await llm.check_health()
    llm._engine = cast("Any", SimpleNamespace(abort=(aborted := list[str]()).append))
    await llm.abort("one")
    await llm.abort(["two", "three"])
    assert aborted == ["one", "two", "three"]


async def test_control_of_the_engine_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Control:
        async def sleep(self, **options: Any) -> None:
            asked.append(("sleep", options))

        async def wake_up(self, **options: Any) -> None:
            asked.append(("wake_up", options))

        async def is_sleeping(self) -> bool:
            return True

        async def reload_weights(self, model: str, **options: Any) -> None:
            asked.append((model, options))

    async def ready(timeout_s: float) -> None:
        asked.append(timeout_s)

    llm = AsyncLLM()
    llm._engine = cast("Any", SimpleNamespace(control=Control(), is_sleeping=True, wait_until_ready=ready))
    await llm.sleep()
    await llm.sleep(2, "abort")
    await llm.wake_up(["kv_cache"])
    await llm.wake_up(["weights"])
    assert await llm.is_sleeping()
    await llm.reload_weights("m", "r")
    assert asked == [
        ("sleep", {"level": 1, "mode": "keep"}),
        ("sleep", {"level": 2, "mode": "abort"}),
        ("wake_up", {"tags": ["kv_cache"]}),
        60.0,
        ("wake_up", {"tags": ["weights"]}),
        ("m", {"revision": "r"}),
    ]
    assert async_llm.AsyncLLMEngine is AsyncLLM


def generation(*deltas: Any, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> tuple[_Generation, Stream]:
    params = SamplingParams(output_kind=kind)
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling_params=params)
    tokenizer = Tokenizer.load("pagoda-tiny")
    stream = Stream(request, list(deltas))
    builder = RequestOutputBuilder(request=request, prompt=PROMPT, tokenizer=tokenizer)
    return _Generation(cast("Any", stream), builder), stream


@pytest.mark.parametrize(
    ("kind", "text", "at_least", "num_news"),
    [
        (RequestOutputKind.CUMULATIVE, "ab", 1, 2),
        (RequestOutputKind.DELTA, "ab", 1, 2),
        (RequestOutputKind.FINAL_ONLY, "ab", 64, 1),
    ],
)
async def test_a_request_of_the_stepping_engine_tells_its_news(
    kind: RequestOutputKind, text: str, at_least: int, num_news: int
) -> None:
    made, stream = generation(delta("a"), delta("b", reason="stop"), kind=kind)
    news: list[bool] = []
    on_news: Any = SimpleNamespace(set=lambda: news.append(made.is_finished))
    await made.follow(on_news)
    assert (news, stream.at_least, stream.num_closed) == ([False, True][-num_news:], [at_least] * 2, 1)
    assert (made.is_finished, made.has_news) == (True, True)
    output: Any = made.output()
    assert (output.outputs[0].text, made.has_news, output.prompt_logprobs) == (text, False, [None])
    again: Any = made.output()
    assert again.outputs[0].text == ("" if kind is RequestOutputKind.DELTA else text)


async def test_a_request_that_fails_alone_ends_and_another_failure_is_raised() -> None:
    made, stream = generation(delta("a"), RequestFailed("lost"))
    on_news = asyncio.Event()
    await made.follow(on_news)
    output: Any = made.output()
    assert (output.outputs[0].finish_reason, output.outputs[0].text, on_news.is_set()) == ("error", "a", True)
    assert (made.is_finished, stream.num_closed) == (True, 1)
    made, stream = generation(QueueFull("full"))
    with pytest.raises(PagodaError) as caught:
        await made.follow(asyncio.Event())
    assert (caught.value.code, stream.num_closed) == (Code.RESOURCE_EXHAUSTED, 1)


class Loop:
    """Runs what it is given on the test's own loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, call: Any) -> Any:
        return self._loop.run_until_complete(call)

    def close(self) -> None:
        self._loop.close()


def test_the_stepping_engine_gives_each_request_its_arguments(tokenizer: Tokenizer) -> None:
    harness, loop = Harness(tokenizer, address="a:1"), Loop()
    engine = LLMEngine(harness.llm_async, cast("Any", loop))
    style, text = LoRARequest("style", 1, "/s"), "one two three"
    assert engine.step() == []
    assert engine.add_request("a", text, SamplingParams(seed=4), lora_request=style, priority=7) == "a"
    engine.add_request("b", text, given := SamplingParams(), tokenization_kwargs={"add_special_tokens": False})
    engine.add_request("c", text, SamplingParams())
    assert engine.get_num_unfinished_requests() == 3
    first, second, third = harness.requests
    assert (first.request_id, first.priority, first.lora, first.sampling_params.seed) == ("a", 7, style.adapter, 4)
    draw = random.Random(0)
    drawn = [draw.getrandbits(63) for _ in range(2)]
    assert [second.sampling_params.seed, third.sampling_params.seed] == drawn
    assert given.seed is None
    texts: dict[str, str] = {}
    while engine.has_unfinished_requests():
        for output in cast("Any", engine.step()):
            texts[output.request_id] = output.outputs[0].text
    assert texts == {"a": "ab", "b": "ab", "c": "ab"}
    assert engine.get_num_unfinished_requests() == 0
    for wrong, message in ((5, "request_id must be a text, got 5"), ("", "request_id must be a text, got ''")):
        with pytest.raises(InvalidRequest, match=message) as caught:
            engine.add_request(cast("Any", wrong), text, SamplingParams())
        assert caught.value.field == "request_id"
    engine.add_request("d", text, SamplingParams())
    with pytest.raises(InvalidRequest, match="request_id 'd' is in use"):
        engine.add_request("d", text, SamplingParams())
    with pytest.raises(InvalidRequest, match="trace_headers is not supported"):
        engine.add_request("e", text, SamplingParams(), trace_headers={"a": "b"})
    engine.abort_request("d")
    assert not engine.has_unfinished_requests()
    loop.close()


async def test_an_engine_and_its_loop_are_shut_down_together() -> None:
    done: list[str] = []

    class Async:
        def shutdown(self) -> Any:
            async def close() -> None:
                done.append("engine")

            return close()

    class Thread:
        def run(self, call: Any) -> None:
            call.close()
            done.append("run")
            raise RuntimeError("it is gone")

        def close(self) -> None:
            done.append("loop")

    with pytest.raises(RuntimeError):
        llm_engine.shut_down(cast("Any", Async()), cast("Any", Thread()))
    assert done == ["run", "loop"], "the loop ends however the engine does"


def test_a_pooled_request_samples_nothing() -> None:
    assert (POOLED.temperature, POOLED.max_tokens, POOLED.detokenize) == (0.0, 1, False)
