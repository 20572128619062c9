"""What LLM and AsyncLLM make of their arguments, before and after an engine that is only asked."""

import random
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda import AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.llm import async_llm
from pagoda.llm import llm as llm_module
from pagoda.llm.llm_engine import LLMEngine
from pagoda.lora.request import LoRARequest
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import InvalidRequest, NotReady, QueueFull, RequestFailed
from pagoda_common.params.outputs import SequenceDelta
from pagoda_common.params.pooling_params import POOLED
from pagoda_common.text.tokenizer import Tokenizer
from tests.unit.client.llm.llm_harness import PROMPT, Harness, delta


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


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


@pytest.mark.parametrize("call", ["generate", "enqueue"])
def test_what_vllm_takes_besides_is_refused_before_anything_is_kept(harness: Harness, call: str) -> None:
    with pytest.raises(InvalidRequest, match="trace_headers is not supported") as caught:
        getattr(harness.llm, call)("one", use_tqdm=False, trace_headers={"a": "b"})
    assert caught.value.field == "trace_headers"
    with pytest.raises(TypeError, match="unexpected argument 'nonsense'"):
        getattr(harness.llm, call)("one", use_tqdm=False, nonsense=1)
    assert harness.llm.wait_for_completion(use_tqdm=False) == []


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


def test_a_pooled_request_samples_nothing() -> None:
    assert (POOLED.temperature, POOLED.max_tokens, POOLED.detokenize) == (0.0, 1, False)


def test_cached_prefixes_are_dropped_by_either_engine(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    async def reset() -> None:
        calls.append("reset")

    monkeypatch.setattr(harness.llm_async, "reset_prefix_cache", reset)
    engine = LLMEngine(harness.llm_async, harness.llm._loop)
    assert harness.llm.reset_prefix_cache()
    assert engine.reset_prefix_cache()
    assert harness.llm.reset_prefix_cache(start_engine_loop=True), "what vLLM takes besides"
    with pytest.raises(TypeError, match="unexpected argument 'device'"):
        harness.llm.reset_prefix_cache(device="all")
    assert calls == ["reset"] * 3
