"""POST /v1/completions, plain and streamed, over real sockets."""

from typing import Any

import pytest

from pagoda_common.errors import QueueFull
from pagoda_common.text.tokenizer import Tokenizer
from tests.fakes.fake_scheduler import FakeScheduler
from tests.service.frontend.harness import MODEL, EveryRequest, Running, running_frontend, until

COMPLETIONS = "/v1/completions"
TEXT = "Once upon a time there was a café with 日本語 menus 🙂 and a cat. The end."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


async def test_the_answer_has_openais_shape(frontend: Running) -> None:
    answer = await frontend.complete(max_tokens=4, temperature=0)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["system_fingerprint"].startswith("pagoda-")
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    [choice] = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert choice["logprobs"] is None


async def test_text_comes_back_as_it_was_sampled(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    answer = await frontend.complete(prompt="say it", max_tokens=400)
    assert answer["choices"][0]["text"] == TEXT
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_concatenates_to_the_plain_text(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    events = await frontend.events(COMPLETIONS, prompt="say it", max_tokens=400)
    assert events.pop() == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert all("usage" not in event for event in events)
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("is_chat", [False, True])
async def test_no_text_is_made_where_none_is_wanted(frontend: Running, tokenizer: Tokenizer, is_chat: bool) -> None:
    frontend.fake.script = ids = tokenizer.encode(TEXT)
    path = "/v1/chat/completions" if is_chat else COMPLETIONS
    prompt = {"messages": [{"role": "user", "content": "say it"}]} if is_chat else {"prompt": "say it"}
    body = {"model": MODEL, **prompt, "max_tokens": 400, "detokenize": False, "return_token_ids": True}
    [choice] = (await frontend.post(path, body)).json()["choices"]
    assert choice["token_ids"][: len(ids)] == ids
    assert not (choice["message"]["content"] if is_chat else choice["text"])
    events = await frontend.events(path, **body)
    assert events.pop() == "[DONE]"
    choices = [event["choices"][0] for event in events]
    assert [token for choice in choices for token in choice.get("token_ids") or ()][: len(ids)] == ids
    assert not any(choice["delta"].get("content") if is_chat else choice["text"] for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"
    refused = await frontend.post(path, body | {"stop": ["x"]})
    assert refused.status_code == 400
    assert "stop strings need detokenize=True" in refused.text


async def test_max_tokens_is_16_by_default(frontend: Running) -> None:
    assert (await frontend.complete())["usage"]["completion_tokens"] == 16


async def test_max_tokens_is_cut_to_the_context(frontend: Running) -> None:
    answer = await frontend.complete(prompt=[5] * 509, max_tokens=1000)
    assert answer["usage"] == {"prompt_tokens": 509, "completion_tokens": 3, "total_tokens": 512}


async def test_prompts_come_in_four_forms(frontend: Running, tokenizer: Tokenizer) -> None:
    one, two = "Hello there", "Good night"
    ids = [tokenizer.encode(one), tokenizer.encode(two)]
    texts = await frontend.complete(prompt=[one, two], max_tokens=3)
    tokens = await frontend.complete(prompt=ids, max_tokens=3)
    assert [choice["text"] for choice in texts["choices"]] == [choice["text"] for choice in tokens["choices"]]
    assert [choice["index"] for choice in texts["choices"]] == [0, 1]
    assert texts["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
    assert texts["usage"]["completion_tokens"] == 6
    alone = await frontend.complete(prompt=two, max_tokens=3)
    assert alone["choices"][0]["text"] == texts["choices"][1]["text"]
    assert (await frontend.complete(prompt=ids[1], max_tokens=3))["choices"][0]["text"] == alone["choices"][0]["text"]


async def test_n_sequences_of_several_prompts_are_numbered_prompt_by_prompt(frontend: Running) -> None:
    body = {"prompt": [[10], [20]], "n": 2, "max_tokens": 2, "temperature": 1, "return_token_ids": True}
    answer = await frontend.complete(**body)
    expected = [[11, 12], [111, 112], [21, 22], [121, 122]]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[10], [10], [20], [20]]
    events = await frontend.events(COMPLETIONS, **body)
    streamed: dict[int, list[int]] = {}
    for event in events[:-1]:
        [choice] = event["choices"]
        streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [streamed[index] for index in range(4)] == expected


async def test_a_stop_string_ends_the_text_before_it(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    plain = await frontend.complete(stop=["a cat", "never"], max_tokens=400)
    [choice] = plain["choices"]
    assert choice["text"] == TEXT.partition("a cat")[0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "a cat"
    kept = await frontend.complete(stop="a cat", include_stop_str_in_output=True, max_tokens=400)
    assert kept["choices"][0]["text"] == TEXT.partition("a cat")[0] + "a cat"
    events = await frontend.events(COMPLETIONS, prompt=[5], stop=["a cat"], max_tokens=400)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == choice["text"]
    assert events[-2]["choices"][0]["stop_reason"] == "a cat"


async def test_a_stop_token_is_named_and_left_out_of_the_text(frontend: Running) -> None:
    answer = await frontend.complete(prompt=[10], stop_token_ids=[13], max_tokens=10)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == 13
    assert answer["usage"]["completion_tokens"] == 3


async def test_logprobs_have_the_legacy_shape(frontend: Running, tokenizer: Tokenizer) -> None:
    answer = await frontend.complete(prompt=[300], max_tokens=3, logprobs=2)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(token) for token in (301, 302, 303)]
    assert logprobs["token_logprobs"] == pytest.approx([-0.5] * 3)
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert logprobs["top_logprobs"][0][tokenizer.token_text(302)] == pytest.approx(-1.5)
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    events = await frontend.events(COMPLETIONS, prompt=[300], max_tokens=3, logprobs=2)
    streamed = [event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]]
    for name, values in logprobs.items():
        assert [value for part in streamed for value in part[name]] == values


async def test_logprobs_0_give_the_sampled_token_only(frontend: Running) -> None:
    answer = await frontend.complete(prompt=[300], max_tokens=2, logprobs=0, return_tokens_as_token_ids=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:301", "token_id:302"]
    assert logprobs["top_logprobs"] == [{"token_id:301": -0.5}, {"token_id:302": -0.5}]


async def test_the_server_may_write_every_token_as_its_id() -> None:
    async with running_frontend(return_tokens_as_token_ids=True) as running:
        answer = await running.complete(prompt=[300], max_tokens=2, logprobs=0)
        assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:301", "token_id:302"]
        chat = await running.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        )
        tokens = [entry["token"] for entry in chat.json()["choices"][0]["logprobs"]["content"]]
        assert {token.partition(":")[0] for token in tokens} == {"token_id"}
        text = await running.complete(prompt=[300], max_tokens=2, logprobs=0, return_tokens_as_token_ids=False)
        assert "token_id:301" not in text["choices"][0]["logprobs"]["tokens"]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
async def test_the_server_may_put_the_usage_into_every_chunk(options: dict[str, Any]) -> None:
    async with running_frontend(enable_force_include_usage=True) as running:
        events = await running.events(COMPLETIONS, prompt=[5, 6], max_tokens=3, **options)
        assert events.pop() == "[DONE]"
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert (counts, counts[-1], events[-1]["choices"]) == (sorted(counts), 3, [])
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **options}
        events = await running.events("/v1/chat/completions", **chat)
        assert events.pop() == "[DONE]"
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert (counts, counts[-1], events[-1]["choices"]) == (sorted(counts), 3, [])


async def test_echo_puts_the_prompt_before_the_text(frontend: Running) -> None:
    plain = await frontend.complete(prompt="Hello", max_tokens=3)
    echoed = await frontend.complete(prompt="Hello", max_tokens=3, echo=True)
    assert echoed["choices"][0]["text"] == "Hello" + plain["choices"][0]["text"]
    events = await frontend.events(COMPLETIONS, prompt="Hello", max_tokens=3, echo=True)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == echoed["choices"][0]["text"]


async def test_usage_is_streamed_when_asked_for(frontend: Running) -> None:
    events = await frontend.events(COMPLETIONS, prompt=[5, 6], max_tokens=3, stream_options={"include_usage": True})
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert all(event["usage"] is None for event in events[:-2])
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await frontend.events(COMPLETIONS, prompt=[5, 6], max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 3


async def test_cached_tokens_are_reported_when_enabled() -> None:
    async with running_frontend(enable_prompt_tokens_details=True) as running:
        running.fake.num_cached_tokens = 2
        answer = await running.complete(max_tokens=2)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_sampling_goes_to_the_engine_as_asked(frontend: Running) -> None:
    await frontend.complete(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, min_tokens=1, ignore_eos=True, max_tokens=2,
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={"7": 200},
        allowed_token_ids=[8, 9], bad_words=["cat"], priority=-4, cache_salt="me",
    )  # fmt: skip
    submit = frontend.fake.submits[-1]
    params = submit.sampling_params
    assert (submit.priority, submit.cache_salt) == (-4, "me")
    assert (params.seed, params.top_k, params.min_tokens, params.max_tokens) == (3, 7, 1, 2)
    assert [params.temperature, params.top_p, params.min_p] == pytest.approx([0.5, 0.9, 0.1])
    assert [params.presence_penalty, params.frequency_penalty, params.repetition_penalty] == [0.5, -0.5, 1.5]
    assert params.ignore_eos
    assert dict(params.logit_bias) == {7: 100.0}
    assert list(params.allowed_token_ids) == [8, 9]
    assert params.bad_words_token_ids


async def test_the_models_generation_config_fills_what_the_request_leaves_out() -> None:
    fake = FakeScheduler()
    fake.model_info.generation_config_json = '{"temperature": 0.5, "top_k": 9, "max_new_tokens": 5, "top_p": null}'
    async with running_frontend(fake) as running:
        answer = await running.complete()
        params = fake.submits[-1].sampling_params
        assert (params.temperature, params.top_k, params.top_p) == (0.5, 9, 1.0)
        assert answer["usage"]["completion_tokens"] == 5
        await running.complete(temperature=1.5, top_k=0)
        assert fake.submits[-1].sampling_params.temperature == 1.5
        assert fake.submits[-1].sampling_params.top_k == 0


async def test_a_request_that_the_engine_refuses_is_a_503_with_retry_after(frontend: Running) -> None:
    frontend.fake.reject["*"] = QueueFull("too much is waiting", retry_after_s=2.5)
    for stream in (False, True):
        response = await frontend.post(COMPLETIONS, {"model": MODEL, "prompt": [5], "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["type"] == "ServiceUnavailableError"


async def test_an_engine_error_is_a_500_or_the_streams_last_event(frontend: Running) -> None:
    frontend.fake.fail_at = EveryRequest(2)
    response = await frontend.post(COMPLETIONS, {"model": MODEL, "prompt": [5]})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"
    frontend.fake.step_s = 0.01
    events = await frontend.events(COMPLETIONS, prompt=[5])
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == 500
    frontend.fake.fail_at = {}
    await frontend.complete()


async def test_a_client_that_leaves_ends_its_request(frontend: Running) -> None:
    frontend.fake.step_s = 0.005
    body = {"model": MODEL, "prompt": [5], "max_tokens": 400}
    async with frontend.http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
        await anext(response.aiter_lines())
    await until(lambda: len(frontend.fake.aborted) == 1)
    with pytest.raises(Exception, match=r".*"):
        await frontend.http.post(COMPLETIONS, json=body, timeout=0.1)
    await until(lambda: len(frontend.fake.aborted) == 2)
    await until(lambda: frontend.fake.num_open_sequences == 0)
    with pytest.raises(Exception, match=r".*"):
        await frontend.http.post(COMPLETIONS, json={**body, "prompt": [[5], [6], [7]]}, timeout=0.1)
    await until(lambda: len(frontend.fake.aborted) == 5)
    assert frontend.server.serving.num_open == 0


async def test_the_clients_request_id_is_in_the_answer(frontend: Running) -> None:
    response = await frontend.post(
        COMPLETIONS, {"model": MODEL, "prompt": [5]}, headers={"X-Request-Id": "trace/1 \xfc".encode("latin-1")}
    )
    assert response.json()["id"] == "cmpl-trace_1__"
    assert response.headers["x-request-id"] == "trace_1__"
    assert frontend.fake.submits[-1].request_id.startswith("cmpl-trace_1__-")
    answer = await frontend.complete(request_id="日本")
    assert answer["id"] == "cmpl-__"


async def test_a_silent_stream_is_kept_alive() -> None:
    async with running_frontend(sse_keep_alive_interval_s=0.05) as running:
        running.fake.is_paused = True
        body = {"model": MODEL, "prompt": [5], "stream": True, "max_tokens": 2}
        lines = []
        async with running.http.stream("POST", COMPLETIONS, json=body) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 2:
                    running.fake.is_paused = False
        assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_counts_every_prompt_and_every_choice(n: int) -> None:
    fake = FakeScheduler()
    fake.num_cached_tokens = 1
    prompts = [[5], [6, 7], [8, 9, 10, 11]]
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 3 * n * 4,
        "total_tokens": 7 + 3 * n * 4,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    async with running_frontend(fake, enable_prompt_tokens_details=True) as frontend:
        answer = await frontend.complete(prompt=prompts, n=n, max_tokens=4)
        assert answer["usage"] == usage
        assert [choice["index"] for choice in answer["choices"]] == list(range(3 * n))
        events = await frontend.events(
            "/v1/completions", prompt=prompts, n=n, max_tokens=4, stream_options={"include_usage": True}
        )
        assert events[-2]["usage"] == usage
