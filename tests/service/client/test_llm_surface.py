"""What vLLM's LLM has besides generate: conversations, queues, figures, refusals, options. A fake scheduler answers."""

from typing import Any

import numpy as np
import pytest

from pagoda import LLM, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.errors import Code, ConfigError, InvalidRequest, NotReady, PagodaError
from tests.fakes.fake_scheduler import FakeScheduler
from tests.service.client.conftest import FakeSchedulerThread

PARAMS = SamplingParams(max_tokens=3)
QUESTION = {"role": "user", "content": "Hi"}


@pytest.fixture
def fake(scheduler_thread: FakeSchedulerThread) -> FakeScheduler:
    scheduler_thread.fake.submits.clear()
    return scheduler_thread.fake


def rendered(llm: LLM, messages: Any, **options: Any) -> str:
    (output,) = llm.chat(messages, PARAMS, use_tqdm=False, **options)
    assert output.prompt is not None
    return output.prompt


def test_content_may_come_in_parts(llm: LLM, fake: FakeScheduler) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in rendered(llm, [{"role": "user", "content": parts}])
    assert llm.chat([], PARAMS, use_tqdm=False) == []


def test_the_final_message_can_be_continued(llm: LLM, fake: FakeScheduler) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "Hello, I"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(llm, messages, **options).endswith("assistant\nHello, I")
    assert rendered(llm, messages, add_generation_prompt=False).endswith("Hello, I<|im_end|>\n")
    with pytest.raises(InvalidRequest, match="needs add_generation_prompt=False"):
        llm.chat(messages, PARAMS, continue_final_message=True)


def test_the_template_gets_tools_calls_as_objects_and_variables(llm: LLM, fake: FakeScheduler) -> None:
    template = (
        "{{ tools[0].function.name }} {{ mood }} {% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    options = {"chat_template": template, "tools": tools, "chat_template_kwargs": {"mood": "calm"}}
    assert rendered(llm, messages, **options) == "weather calm Ulm"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list of messages"),
        (["hi"], "a conversation must be a list of at least one message"),
        ([[]], "a conversation must be a list of at least one message"),
        ([[QUESTION, 5]], "messages.1 must be an object with a role"),
        ([{"content": "x"}], "messages.0 must be an object with a role"),
        ([{"role": "user"}], "a user message needs content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "content.0: models take text only"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "tool_calls must be calls of functions"),
    ],
)
def test_messages_that_are_none_are_named(llm: LLM, fake: FakeScheduler, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        llm.chat(messages, PARAMS)
    assert caught.value.field == "messages"
    assert fake.submits == []


def test_tokens_prompts_may_bring_their_text_and_numpys_integers(llm: LLM, fake: FakeScheduler) -> None:
    prompt: Any = {"prompt_token_ids": list(np.arange(5, 8)), "prompt": "its text"}
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("its text", [5, 6, 7])
    assert all(type(token_id) is int for token_id in output.prompt_token_ids)
    with pytest.raises(InvalidRequest, match="multi_modal_data is not supported: models take text only"):
        llm.generate([{"prompt": "x", "multi_modal_data": {"image": 1}}], PARAMS)  # type: ignore[list-item]


def test_tokenization_kwargs_truncate(llm: LLM, fake: FakeScheduler) -> None:
    ids = llm.get_tokenizer().encode("one two three four five six")
    options = {"truncate_prompt_tokens": 2, "add_special_tokens": False}
    (output,) = llm.generate("one two three four five six", PARAMS, use_tqdm=False, tokenization_kwargs=options)
    assert output.prompt_token_ids == ids[-2:]
    with pytest.raises(InvalidRequest, match="tokenization_kwargs has 'padding'"):
        llm.generate("x", PARAMS, tokenization_kwargs={"padding": True})


def test_what_is_enqueued_waits_for_its_completion(llm: LLM, fake: FakeScheduler) -> None:
    ids = llm.enqueue(["a", "b"], PARAMS) + llm.enqueue("c", PARAMS, priority=[5])
    assert fake.submits == []
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.prompt for output in outputs] == ["a", "b", "c"]
    assert all(output.finished for output in outputs)
    assert [submit.priority for submit in fake.submits] == [0, 0, 5]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_metrics_have_the_servers_names(scheduler_thread: FakeSchedulerThread, fake: FakeScheduler) -> None:
    with LLM(address=scheduler_thread.address) as llm:
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=4), use_tqdm=False)
        values: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    assert values["vllm:generation_tokens"].value == 4
    assert values["vllm:prompt_tokens"].value == len(output.prompt_token_ids)
    lengths = values["vllm:request_generation_tokens"]
    assert (lengths.count, lengths.sum, lengths.buckets["2.0"], lengths.buckets["+Inf"]) == (1, 4, 0, 1)
    assert values["vllm:request_prompt_tokens"].sum == len(output.prompt_token_ids)
    assert values["vllm:request_success"].labels["finished_reason"] == "length"
    assert values["vllm:kv_cache_usage_perc"].value == 0.0
    assert values["vllm:num_requests_running"].labels == {"model_name": "pagoda-tiny", "engine": "0"}


def test_an_output_says_when_what_happened(llm: LLM, fake: FakeScheduler) -> None:
    (output,) = llm.generate("Hello", PARAMS, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.num_generation_tokens == 3
    assert metrics.queued_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency == pytest.approx(metrics.first_token_ts - metrics.queued_ts)


@pytest.mark.parametrize("call", ["classify", "reward"])
def test_what_a_model_does_not_make_of_prompts_is_refused(llm: LLM, call: str) -> None:
    task = {"reward": "token_classify"}.get(call, call)
    with pytest.raises(InvalidRequest, match=f"Unsupported task: {task!r}.*it can embed"):
        getattr(llm, call)("text")


@pytest.mark.parametrize("call", ["collective_rpc", "apply_model", "start_profile", "stop_profile"])
def test_what_does_not_exist_says_so(llm: LLM, call: str) -> None:
    with pytest.raises(PagodaError, match=f"LLM.{call} is not supported: ") as caught:
        getattr(llm, call)()
    assert caught.value.code is Code.UNIMPLEMENTED


def test_further_arguments_of_vllm_are_refused_when_they_ask_for_something(llm: LLM, fake: FakeScheduler) -> None:
    assert llm.generate("a", PARAMS, use_tqdm=False, lora_request=None)[0].finished
    with pytest.raises(InvalidRequest, match="lora_request must be a LoRARequest, got str"):
        llm.generate("a", PARAMS, lora_request="adapter")
    with pytest.raises(InvalidRequest, match="mm_processor_kwargs is not supported"):
        llm.chat([QUESTION], PARAMS, mm_processor_kwargs={"a": 1})
    with pytest.raises(TypeError, match="unexpected argument 'nonsense'"):
        llm.generate("a", PARAMS, nonsense=1)
    with pytest.raises(InvalidRequest, match="chat_template_content_format is 'other'"):
        llm.chat([QUESTION], PARAMS, chat_template_content_format="other")


def test_a_bad_grammar_is_refused_before_anything_is_submitted(llm: LLM, fake: FakeScheduler) -> None:
    with pytest.raises(InvalidRequest, match="regex"):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))
    assert fake.submits == []
    choice = StructuredOutputsParams(choice=["yes", "no"])
    llm.generate("a", SamplingParams(structured_outputs=choice, max_tokens=2), use_tqdm=False)
    assert list(fake.submits[-1].sampling_params.structured_output.choice.texts) == ["yes", "no"]


def test_bad_words_are_sent_as_tokens(llm: LLM, fake: FakeScheduler) -> None:
    llm.generate("a", SamplingParams(bad_words=["dog"], max_tokens=2), use_tqdm=False)
    sent = [list(words.ids) for words in fake.submits[-1].sampling_params.bad_words_token_ids]
    assert llm.get_tokenizer().encode("dog", add_special_tokens=False) in sent
    llm.generate("a", SamplingParams(bad_words=["cat"], max_tokens=2), use_tqdm=False)
    others = [list(words.ids) for words in fake.submits[-1].sampling_params.bad_words_token_ids]
    assert llm.get_tokenizer().encode("cat", add_special_tokens=False) in others
    assert not any(words in sent for words in others)


def test_chosen_tokens_have_logprobs_without_a_rank(llm: LLM, fake: FakeScheduler) -> None:
    (output,) = llm.generate("a", SamplingParams(logprob_token_ids=[4, 9], max_tokens=1), use_tqdm=False)
    assert list(fake.submits[-1].sampling_params.logprob_token_ids) == [4, 9]
    assert output.outputs[0].logprobs is not None
    (row,) = output.outputs[0].logprobs
    assert next(iter(row)) == output.outputs[0].token_ids[0]
    assert [entry.rank for entry in list(row.values())[1:]] == [None] * (len(row) - 1)


def test_options_are_taken_as_vllm_takes_them() -> None:
    config = engine_config_from_options(
        served_model_name="name",
        dtype="half",
        max_model_len="auto",
        override_generation_config={"temperature": 0.5},
        tensor_parallel_size=1,
        quantization=None,
        swap_space=4,
        enforce_eager=True,
    )
    model = config.model
    assert (model.served_model_name, model.dtype, model.max_model_len) == (("name",), "float16", -1)
    assert model.override_generation_config == '{"temperature": 0.5}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modle_len": 5}, "unknown argument 'max_modle_len'; did you mean max_model_len"),
        ({"quantization": "quark"}, "quantization is 'quark', must be one of int8, "),
        ({"task": "draw"}, "task=draw is not supported: use --runner and --convert"),
        ({"max_loras": 0, "enable_lora": True}, "max_loras is 0, must be between 1 and 1024"),
        ({"lora_dtype": "float16"}, "lora_dtype=float16 is not supported"),
        ({"xyzzy": 1}, "unknown argument 'xyzzy'$"),
    ],
)
def test_options_that_cannot_be_had_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        engine_config_from_options(**options)
    assert caught.value.field == next(iter(options))


async def test_async_outputs_may_be_new_parts_or_the_end_alone(
    scheduler_thread: FakeSchedulerThread, fake: FakeScheduler
) -> None:
    async with AsyncLLM(address=scheduler_thread.address) as llm:
        await llm.check_health()
        whole = ""
        token_ids: list[int] = []
        params = SamplingParams(max_tokens=12, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate("Hello", params):
            whole += output.outputs[0].text
            token_ids += output.outputs[0].token_ids
        params = SamplingParams(max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)
        [final] = [output async for output in llm.generate("Hello", params)]
        assert (final.outputs[0].text, final.outputs[0].token_ids) == (whole, token_ids)
        assert final.finished
        with pytest.raises(InvalidRequest, match="trace_headers is not supported"):
            await anext(llm.generate("Hello", trace_headers={"a": "b"}))
        with pytest.raises(InvalidRequest, match=r"pooling_params must be PoolingParams"):
            await anext(llm.encode("Hello", {"task": "embed"}))  # type: ignore[arg-type]
    with pytest.raises(NotReady):
        await llm.check_health()


async def test_an_aborted_request_ends_with_what_there_is(
    scheduler_thread: FakeSchedulerThread, fake: FakeScheduler
) -> None:
    fake.step_s = 0.01
    try:
        async with AsyncLLM(address=scheduler_thread.address) as llm:
            outputs = []
            async for output in llm.generate("Hello", SamplingParams(max_tokens=400), "mine"):
                if not outputs:
                    await llm.abort(["mine", "unknown"])
                outputs.append(output)
    finally:
        fake.step_s = 0.0
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert 0 < len(outputs[-1].outputs[0].token_ids) < 400
