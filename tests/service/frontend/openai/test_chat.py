"""POST /v1/chat/completions through the real openai client."""

import asyncio
import json
from typing import Any

import openai
import pytest

from pagoda_common.text.tokenizer import Tokenizer
from tests.service.frontend.harness import MODEL, Running, until

CHAT = "/v1/chat/completions"
TEXT = "Hello! A naïve 🙂 answer, in two sentences. Here is the second."
USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


async def test_the_openai_client_gets_an_answer(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    answer = await frontend.openai.chat.completions.create(model=MODEL, messages=USER)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    rendered = tokenizer.apply_chat_template(USER)
    assert answer.usage.prompt_tokens == len(tokenizer.encode(rendered, add_special_tokens=False))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_message_has_every_field_of_vllms(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    answer = await frontend.openai.chat.completions.with_raw_response.create(model=MODEL, messages=USER)
    [choice] = json.loads(answer.text)["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": TEXT,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
    }
    message = answer.parse().choices[0].message
    assert (message.refusal, message.annotations, message.audio, message.tool_calls) == (None, None, None, [])


async def test_the_ids_of_the_prompt_come_first_in_a_stream(frontend: Running) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 3}
    extra = {"return_token_ids": True}
    whole = await frontend.openai.chat.completions.create(**body, extra_body=extra)
    stream = await frontend.openai.chat.completions.create(**body, extra_body=extra, stream=True)
    first, *others = [chunk.model_dump() async for chunk in stream]
    assert first["prompt_token_ids"] == whole.model_dump()["prompt_token_ids"]
    assert first["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in others)


async def test_the_openai_client_streams_the_same_text(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    stream = await frontend.openai.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(frontend.fake.script) + 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_without_max_tokens_the_answer_may_fill_the_context(frontend: Running) -> None:
    answer = await frontend.openai.chat.completions.create(model=MODEL, messages=USER, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_bound_the_answer(frontend: Running, name: str) -> None:
    bound: dict[str, Any] = {name: 5}
    answer = await frontend.openai.chat.completions.create(model=MODEL, messages=USER, **bound)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


async def test_content_parts_are_one_text(frontend: Running) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    await frontend.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
    whole = [messages[0], {"role": "user", "content": "one\ntwo"}]
    await frontend.openai.chat.completions.create(model=MODEL, messages=whole, max_tokens=2)
    first, second = frontend.fake.submits[-2:]
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_logprobs_have_openais_shape(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = [500, 501]
    answer = await frontend.openai.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=3, max_tokens=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first = logprobs.content[0]
    assert first.token == tokenizer.token_text(500)
    assert first.logprob == pytest.approx(-0.5)
    assert bytes(first.bytes or ()) == tokenizer.token_bytes(500)
    assert [top.token for top in first.top_logprobs] == [tokenizer.token_text(token) for token in (500, 501, 502)]
    assert [top.logprob for top in first.top_logprobs] == pytest.approx([-0.5, -1.5, -2.5])
    stream = await frontend.openai.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=3, max_tokens=2, stream=True
    )
    streamed = []
    async for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == logprobs.content


async def test_logprobs_without_top_have_empty_lists(frontend: Running) -> None:
    answer = await frontend.openai.chat.completions.create(model=MODEL, messages=USER, logprobs=True, max_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [entry.top_logprobs for entry in logprobs.content or []] == [[], []]


async def test_n_answers_each_begin_with_a_role(frontend: Running) -> None:
    stream = await frontend.openai.chat.completions.create(
        model=MODEL, messages=USER, n=3, max_tokens=4, temperature=1, stream=True
    )
    chunks = [chunk async for chunk in stream]
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [chunk.choices[0].index for chunk in chunks if chunk.choices[0].delta.role] == [0, 1, 2]
    answer = await frontend.openai.chat.completions.create(model=MODEL, messages=USER, n=3, max_tokens=4, temperature=1)
    assert [choice.message.content for choice in answer.choices] == list(texts.values())
    assert len(set(texts.values())) == 3


async def test_the_final_message_can_be_continued(frontend: Running, tokenizer: Tokenizer) -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer is"}]
    body = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    frontend.fake.script = tokenizer.encode(" four", add_special_tokens=False)
    answer = await frontend.openai.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
    prompt = frontend.fake.submits[-1].prompt_token_ids
    ids = [int.from_bytes(prompt[place : place + 4], "little") for place in range(0, len(prompt), 4)]
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("The answer is")
    assert answer.choices[0].message.content == "The answer is four"


async def test_a_template_that_refuses_is_a_400(frontend: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await frontend.openai.chat.completions.create(model=MODEL, messages=[])
    assert caught.value.param == "messages"


async def test_the_openai_client_knows_our_errors(frontend: Running) -> None:
    with pytest.raises(openai.NotFoundError):
        await frontend.openai.chat.completions.create(model="gpt-9", messages=USER)
    with pytest.raises(openai.BadRequestError) as caught:
        await frontend.openai.chat.completions.create(model=MODEL, messages=USER, temperature=9)
    assert caught.value.param == "temperature"


async def test_64_streams_at_once_give_the_texts_of_one_by_one(frontend: Running) -> None:
    async def ask(number: int) -> str:
        messages: list[Any] = [{"role": "user", "content": f"number {number}"}]
        stream = await frontend.openai.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=20, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    alone = [await ask(number) for number in range(64)]
    assert list(await asyncio.gather(*map(ask, range(64)))) == alone


async def test_leaving_a_stream_aborts_it(frontend: Running) -> None:
    frontend.fake.step_s = 0.01
    stream = await frontend.openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: len(frontend.fake.aborted) == 1)


async def test_chat_and_text_form_tokenize_alike(frontend: Running, tokenizer: Tokenizer) -> None:
    answer = (await frontend.post("/tokenize", {"messages": USER, "return_token_strs": True})).json()
    rendered = tokenizer.apply_chat_template(USER)
    assert answer["tokens"] == tokenizer.encode(rendered, add_special_tokens=False)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    text = (await frontend.post("/detokenize", {"tokens": answer["tokens"]})).json()["prompt"]
    assert text == rendered


async def test_openais_bound_of_stop_strings_is_this_endpoints_alone(frontend: Running) -> None:
    stop = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    refused = await frontend.post("/v1/chat/completions", {**body, "stop": stop})
    assert refused.status_code == 400
    assert "stop must have at most 4 strings, got 5" in refused.text
    assert (await frontend.post("/v1/chat/completions", {**body, "stop": stop[:4]})).status_code == 200
    assert (await frontend.post("/v1/messages", {**body, "stop_sequences": stop})).status_code == 200
    assert (await frontend.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stop": stop})).status_code == 200


async def test_an_effort_that_no_api_names_is_refused(frontend: Running) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", None):
        answer = await frontend.post("/v1/chat/completions", {**body, "reasoning_effort": effort})
        assert answer.status_code == 200, answer.text
    refused = await frontend.post("/v1/chat/completions", {**body, "reasoning_effort": "bogus"})
    assert refused.status_code == 400
    assert "reasoning_effort" in refused.text
    response = {"input": "a", "max_output_tokens": 16, "reasoning": {"effort": "bogus"}}
    assert (await frontend.post("/v1/responses", response)).status_code == 400
