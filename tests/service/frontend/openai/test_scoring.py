"""Log probabilities of prompts, echoed prompts and truncated ones, over real sockets in front of a fake engine."""

from typing import Any

import pytest

from pagoda_common.text.tokenizer import Tokenizer
from tests.service.frontend.harness import MODEL, Running, running_frontend

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXT = "Once upon a time a café was 🙂 here"
MESSAGES = [{"role": "user", "content": "Hello there"}]
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


async def choice_of(frontend: Running, **body: Any) -> dict[str, Any]:
    [choice] = (await frontend.complete(**body))["choices"]
    return dict(choice)


async def test_prompt_logprobs_have_vllms_shape_in_each_choice(frontend: Running, tokenizer: Tokenizer) -> None:
    answer = await frontend.complete(prompt=[[300, 301, 302], [7, 8]], max_tokens=1, prompt_logprobs=1)
    first, second = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert first == [
        None,
        {
            "301": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(301)},
        },
        {
            "302": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(302)},
        },
    ]
    assert [None if entry is None else list(entry) for entry in second] == [None, ["8"]]
    two = (await choice_of(frontend, prompt=[300, 301], max_tokens=1, prompt_logprobs=2))["prompt_logprobs"]
    assert [(key, entry["rank"]) for key, entry in two[1].items()] == [("301", 1), ("302", 2)]


async def test_prompt_logprobs_are_null_unless_asked_for(frontend: Running) -> None:
    assert (await choice_of(frontend, max_tokens=1))["prompt_logprobs"] is None
    response = await frontend.post(CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": 1})
    assert response.json()["prompt_logprobs"] is None


async def test_prompt_logprobs_of_a_conversation_stand_at_the_top(frontend: Running) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0}
    answer = (await frontend.post(CHAT, body)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_prompt_logprobs_are_no_part_of_a_stream_and_bounded(frontend: Running, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": [5]} if path == COMPLETIONS else {"messages": MESSAGES}
    for fields in ({"stream": True, "prompt_logprobs": 1}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
        response = await frontend.post(path, {"model": MODEL, **prompt, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs"), fields
    assert frontend.fake.submits == []


async def test_the_vocabulary_of_prompt_logprobs_may_be_allowed() -> None:
    async with running_frontend(max_logprobs=-1) as running:
        await running.complete(max_tokens=1, prompt_logprobs=30)
        assert running.fake.submits[-1].sampling_params.prompt_logprobs == 30


async def test_there_is_a_bound_on_what_an_answer_holds() -> None:
    async with running_frontend(max_logprobs=-1) as running:
        body = {"model": MODEL, "prompt": [[5] * 400] * 4, "max_tokens": 1, "prompt_logprobs": -1}
        response = await running.post(COMPLETIONS, body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "prompt_logprobs")
        assert "at most 1048576 entries, got 4916800" in error["message"]


async def test_echo_with_logprobs_begins_with_the_prompt(frontend: Running, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    plain = await choice_of(frontend, prompt=TEXT, max_tokens=4, logprobs=2)
    echoed = await choice_of(frontend, prompt=TEXT, max_tokens=4, logprobs=2, echo=True)
    assert echoed["text"] == TEXT + plain["text"]
    lists, generated = echoed["logprobs"], plain["logprobs"]
    assert lists["tokens"] == [tokenizer.token_text(token) for token in ids] + generated["tokens"]
    assert lists["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1) + generated["token_logprobs"]
    assert lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][1][tokenizer.token_text(ids[1])] == -0.5
    assert lists["top_logprobs"][len(ids) :] == generated["top_logprobs"]
    offsets = lists["text_offset"]
    assert offsets[len(ids) :] == [len(TEXT) + offset for offset in generated["text_offset"]]
    assert offsets == sorted(offsets)
    for token, start, end in zip(lists["tokens"], offsets, [*offsets[1:], None], strict=True):
        part = echoed["text"][start:end]
        assert part == token or "\N{REPLACEMENT CHARACTER}" in token or part == "", (token, part)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("prompt", [TEXT, [300, 301, 302]])
async def test_a_streamed_echo_gives_the_same_lists(frontend: Running, max_tokens: int, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    whole = await choice_of(frontend, **body)
    events = await frontend.events(COMPLETIONS, **body)
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    for name in LISTS:
        assert [value for part in parts for value in part[name]] == whole["logprobs"][name], name
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"


async def test_an_echo_carries_the_usage_too(frontend: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await frontend.events(COMPLETIONS, prompt=TEXT, max_tokens=3, echo=True, stream_options=options)
    assert events[0]["choices"][0]["text"] == TEXT
    assert all(event["usage"]["prompt_tokens"] > 0 for event in events[:-1])
    assert events[-2]["choices"] == []


async def test_scoring_a_prompt_generates_nothing(frontend: Running, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    for logprobs in (None, 0, 5):
        answer = await frontend.complete(prompt=TEXT, max_tokens=0, echo=True, logprobs=logprobs)
        [choice] = answer["choices"]
        assert choice["text"] == TEXT
        assert choice["finish_reason"] == "length"
        assert answer["usage"] == {
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "total_tokens": len(ids),
        }
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            assert [len(choice["logprobs"][name]) for name in LISTS] == [len(ids)] * 4
    frontend.fake.script = []  # the end token comes at once
    assert (await choice_of(frontend, prompt=TEXT, max_tokens=0, echo=True))["finish_reason"] == "length"


async def test_max_tokens_0_needs_echo(frontend: Running) -> None:
    response = await frontend.post(COMPLETIONS, {"model": MODEL, "prompt": [5], "max_tokens": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_several_prompts_and_sequences_are_echoed_each(frontend: Running) -> None:
    body = {"prompt": [[10], [20, 21]], "n": 2, "max_tokens": 2, "temperature": 1, "logprobs": 0, "echo": True}
    choices = (await frontend.complete(**body))["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [3, 3, 4, 4]
    events = await frontend.events(COMPLETIONS, **body)
    for choice in choices:
        own = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        tokens = [token for part in own if part["logprobs"] for token in part["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]


async def test_tokens_of_an_echo_may_be_written_as_ids(frontend: Running) -> None:
    choice = await choice_of(
        frontend, prompt=[300, 301], max_tokens=0, logprobs=0, echo=True, return_tokens_as_token_ids=True
    )
    assert choice["logprobs"]["tokens"] == ["token_id:300", "token_id:301"]


async def test_a_prompt_is_truncated_on_the_side_asked_for(frontend: Running, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    kept = {None: ids[-4:], "left": ids[-4:], "right": ids[:4]}
    for side, expected in kept.items():
        for prompt in (TEXT, ids):
            body = {"prompt": prompt, "truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
            choice = await choice_of(frontend, max_tokens=1, **body)
            assert choice["prompt_token_ids"] == expected
            echoed = await choice_of(frontend, max_tokens=0, echo=True, **body)
            assert echoed["text"] == tokenizer.decode(expected)
    long = [5] * 2000
    answer = await frontend.complete(prompt=long, truncate_prompt_tokens=-1, max_tokens=12)
    assert answer["usage"] == {"prompt_tokens": 500, "completion_tokens": 12, "total_tokens": 512}
    answer = await frontend.complete(prompt=long, truncate_prompt_tokens=500, max_tokens=12)
    assert answer["usage"]["prompt_tokens"] == 500
    whole = await frontend.complete(prompt=TEXT, truncate_prompt_tokens=400, max_tokens=1)
    assert whole["usage"]["prompt_tokens"] == len(ids)


async def test_a_conversation_is_truncated_too(frontend: Running) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "word " * 3000}],
        "truncate_prompt_tokens": -1,
        "max_completion_tokens": 2,
    }
    answer = (await frontend.post(CHAT, body)).json()
    assert answer["usage"] == {"prompt_tokens": 510, "completion_tokens": 2, "total_tokens": 512}
    del body["max_completion_tokens"]
    answer = (await frontend.post(CHAT, body)).json()
    assert answer["usage"]["prompt_tokens"] == 511


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 510, "max_tokens": 3}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "prompt"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 512}, "max_tokens"),
        ({"truncate_prompt_tokens": "x"}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
    ],
)
async def test_a_wrong_truncation_is_a_400(frontend: Running, fields: dict[str, Any], param: str) -> None:
    response = await frontend.post(COMPLETIONS, {"model": MODEL, "prompt": [5, 6], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_logprobs_of_chosen_tokens_go_to_the_engine(frontend: Running) -> None:
    await frontend.complete(max_tokens=1, logprobs=0, logprob_token_ids=[7, 8, 7])
    params = frontend.fake.submits[-1].sampling_params
    assert (list(params.logprob_token_ids), params.logprobs) == ([7, 8], 0)


async def test_arguments_of_logits_processors_go_to_the_engine(frontend: Running) -> None:
    await frontend.complete(max_tokens=1, vllm_xargs={"target": 7, "names": ["a"], "weight": 0.5})
    assert frontend.fake.submits[-1].sampling_params.extra_args_json == '{"target": 7, "names": ["a"], "weight": 0.5}'
