"""Parts of OpenAI's endpoints, each alone: where an invocation leads, batches, choices, prompts, echoes, usages."""

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.truncation import Truncation
from pagoda_frontend.budget import caller as callers
from pagoda_frontend.budget.held_memory import HeldMemory
from pagoda_frontend.openai import chat, completions
from pagoda_frontend.openai.chat import _check_stop, _echo_of, _envelope, _sum, batch_bodies
from pagoda_frontend.openai.completions import Completions
from pagoda_frontend.openai.embeddings import _pooling_of
from pagoda_frontend.openai.invocations import Invocations
from pagoda_frontend.openai.protocol import ChatBatchBody, ChatBody, CompletionBody, EmbeddingBody

USER = {"role": "user", "content": "hi"}


class Endpoints:
    """Says which one was called, and reads the body again."""

    def __init__(self, name: str, told: list[Any]) -> None:
        self._name, self._told = name, told

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any) -> str:
            self._told.append(await request.json())
            return f"{self._name}.{name}"

        return call


async def invoked(body: Any, **model: Any) -> str:
    told: list[Any] = []
    served = SimpleNamespace(**{"only_pools": False, "pooling_tasks": ("embed",)} | model)
    asked: list[Any] = []

    def model_named(name: str | None) -> Any:
        asked.append(name)
        return served

    serving = SimpleNamespace(config=FrontendConfig(), held_memory=HeldMemory(max_bytes=10**6), model_named=model_named)
    made = Invocations(
        serving=cast("Any", serving),
        **{name: cast("Any", Endpoints(name, told)) for name in ("chat", "completions", "embeddings", "pooling")},
    )
    raw = [{"type": "http.request", "body": orjson.dumps(body)}]

    async def receive() -> Any:
        return raw.pop()

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    callers.current_hold.set(None)
    request = SimpleNamespace(headers={"content-type": "application/json"}, scope=scope, receive=receive)
    led = await made.create(cast("Any", request))
    assert told == [body]
    assert asked in ([], [body.get("model") if isinstance(body.get("model"), str) else None])
    return cast("str", led)


@pytest.mark.parametrize(
    ("body", "model", "led"),
    [
        ({"messages": [], "prompt": "a"}, {}, "chat.create"),
        ({"prompt": "a", "model": "m"}, {}, "completions.create"),
        ({"prompt": "a", "model": 5}, {}, "completions.create"),
        ({"input": "a", "messages": []}, {}, "embeddings.create"),
        ({"input": "a"}, {"pooling_tasks": ("classify", "embed")}, "pooling.classify"),
        ({"input": "a"}, {"pooling_tasks": ("token_embed", "embed")}, "pooling.pool"),
        ({"input": "a"}, {"pooling_tasks": ()}, "embeddings.create"),
        ({"messages": []}, {"only_pools": True}, "embeddings.create"),
        ({"messages": []}, {"only_pools": True, "pooling_tasks": ("classify",)}, "pooling.classify"),
        ({"query": "a", "documents": ["b"], "input": "c"}, {}, "pooling.rerank"),
        ({"query": ["a"], "documents": ["b"]}, {}, "pooling.score"),
        ({"query": "a"}, {}, "pooling.score"),
        ({"queries": "a"}, {}, "pooling.score"),
        ({"text_1": "a"}, {}, "pooling.score"),
        ({"data_1": "a"}, {}, "pooling.score"),
    ],
)
async def test_where_an_invocation_leads(body: Any, model: Any, led: str) -> None:
    assert await invoked(body, **model) == led


async def test_an_invocation_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await invoked({"model": "m"})
    assert str(caught.value) == "one of messages, prompt, input and query must be given"


# Conversations.


def chat_body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [USER]} | fields)


def test_a_conversation_has_four_stop_strings() -> None:
    _check_stop(chat_body(stop=["a"] * 4))
    _check_stop(chat_body(stop="abcdef"))
    with pytest.raises(InvalidRequest) as caught:
        _check_stop(chat_body(stop=["a"] * 5))
    told = "stop must have at most 4 strings, got 5"
    assert (str(caught.value), caught.value.field) == (told, "stop")


def test_a_batch_is_a_body_for_each_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(**fields: Any) -> ChatBatchBody:
        return ChatBatchBody.model_validate({"messages": [[USER], [USER, USER]], "temperature": 0.5, "n": 2} | fields)

    bodies = batch_bodies(batch())
    assert [len(body.messages) for body in bodies] == [1, 2]
    assert [(body.temperature, body.n, body.top_p) for body in bodies] == [(0.5, 2, None)] * 2
    with pytest.raises(InvalidRequest) as caught:
        batch_bodies(batch(stream=True))
    assert (str(caught.value), caught.value.field) == ("a batch cannot be streamed", "stream")
    monkeypatch.setattr(chat, "MAX_CONVERSATIONS", 2)
    assert len(batch_bodies(batch())) == 2
    for number in (0, 3):
        with pytest.raises(InvalidRequest) as caught:
            batch_bodies(batch(messages=[[USER]] * number))
        told = f"messages must have between 1 and 2 conversations, got {number}"
        assert (str(caught.value), caught.value.field) == (told, "messages")


def test_usages_are_added_up() -> None:
    one = {"prompt_tokens": 1, "total_tokens": 3, "details": {"cached_tokens": 1}}
    other = {"prompt_tokens": 10, "total_tokens": 30, "details": {"cached_tokens": 5, "more": 2}}
    assert _sum([one, other]) == {
        "prompt_tokens": 11,
        "total_tokens": 33,
        "details": {"cached_tokens": 6, "more": 2},
    }
    assert _sum([one]) == one
    assert _sum([]) == {}


def test_an_answer_echoes_the_message_that_it_continues() -> None:
    last = {"role": "assistant", "content": "He"}
    own = {"echo": True, "add_generation_prompt": False}
    assert _echo_of(chat_body(messages=[USER, last], **own)) == "He"
    assert _echo_of(chat_body(messages=[USER, last], echo=True)) == "He"
    assert _echo_of(chat_body(**own)) == "hi"
    assert _echo_of(chat_body(echo=True)) == ""
    assert _echo_of(chat_body(messages=[USER, last], add_generation_prompt=False)) == ""
    assert _echo_of(chat_body(messages=[USER, {"role": "assistant", "content": None}], echo=True)) == ""


def test_the_head_of_an_answer() -> None:
    call = cast("Any", SimpleNamespace(request_id="r", created=5))
    model = cast("Any", SimpleNamespace(names=("m", "n"), fingerprint="f"))
    whole = {"id": "r", "object": "chat.completion", "created": 5, "model": "m", "system_fingerprint": "f"}
    assert _envelope(chat_body(), call, model) == whole
    streamed = _envelope(chat_body(stream=True, model="n"), call, model)
    assert streamed == whole | {"object": "chat.completion.chunk", "model": "n"}


class Writer:
    """Log probabilities as they were given."""

    def for_chat(self, logprobs: Any) -> Any:
        return {"content": logprobs}

    def for_completion(self, logprobs: Any, offsets: Any) -> Any:
        return {"tokens": logprobs, "text_offset": offsets}


@pytest.mark.parametrize(
    ("content", "echo", "shown"), [("a", "", "a"), (None, "", None), ("", "", ""), (None, "e", "e"), ("a", "e", "ea")]
)
def test_a_choice_of_a_conversation(content: str | None, echo: str, shown: str | None) -> None:
    call = SimpleNamespace(id="c", name="f", arguments="{}")
    message = SimpleNamespace(
        index=1,
        content=content,
        tool_calls=[call],
        reasoning="r",
        logprobs=[1],
        finish_reason="tool_calls",
        stop_reason="s",
        token_ids=[7],
    )
    conversation = SimpleNamespace(logprobs=Writer())
    choice = chat._choice(cast("Any", message), chat_body(return_token_ids=True), cast("Any", conversation), echo)
    assert choice == {
        "index": 1,
        "message": {
            "role": "assistant",
            "content": shown,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            "reasoning": "r",
        },
        "logprobs": {"content": [1]},
        "finish_reason": "tool_calls",
        "stop_reason": "s",
        "token_ids": [7],
    }
    conversation.logprobs = cast("Any", None)
    plain = chat._choice(cast("Any", message), chat_body(), cast("Any", conversation), echo)
    assert (plain["logprobs"], plain["token_ids"]) == (None, None)


# Completions.


def body(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "x"} | fields)


def test_a_choice_of_a_completion() -> None:
    sequence = SimpleNamespace(
        index=3, text="a", finish_reason="stop", stop_reason=9, logprobs=[1], token_text_offsets=[2], token_ids=[7]
    )
    shown = completions._choice(cast("Any", sequence), body(return_token_ids=True), [5], cast("Any", Writer()))
    assert shown == {
        "index": 3,
        "text": "a",
        "logprobs": {"tokens": [1], "text_offset": [2]},
        "finish_reason": "stop",
        "stop_reason": 9,
        "token_ids": [7],
        "prompt_token_ids": [5],
    }
    plain = completions._choice(cast("Any", sequence), body(), [5], None)
    assert (plain["logprobs"], plain["token_ids"], plain["prompt_token_ids"]) == (None, None, None)


class Prompts:
    """A token is a letter."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def from_text(self, text: str, **options: Any) -> list[int]:
        self.asked.append(options)
        cut = options["truncation"]
        ids = [ord(letter) for letter in text]
        return ids if cut is None else cut.apply(ids)

    def from_token_ids(self, token_ids: list[int], *, field: str, truncation: Truncation | None) -> list[int]:
        self.asked.append((field, truncation))
        return token_ids if truncation is None else truncation.apply(token_ids)


class Letters:
    """Reads them again."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


async def prompts_of(given: Any, truncation: Truncation | None = None, **fields: Any) -> tuple[Any, Any, Any]:
    model = SimpleNamespace(prompts=Prompts(), tokenizer=Letters())
    endpoint = Completions(serving=cast("Any", None))
    texts, ids = await endpoint._prompts(body(prompt=given, **fields), cast("Any", model), truncation)
    return texts, ids, model.prompts.asked


async def test_prompts_are_texts_or_token_ids() -> None:
    plain = {"add_special_tokens": True, "field": "prompt", "truncation": None}
    assert await prompts_of("ab") == (["ab"], [[97, 98]], [plain])
    assert await prompts_of(["a", "b"]) == (["a", "b"], [[97], [98]], [plain, plain])
    assert await prompts_of([5, 6]) == ([None], [[5, 6]], [("prompt", None)])
    assert await prompts_of([[5], [6]]) == ([None, None], [[5], [6]], [("prompt", None)] * 2)
    _, _, asked = await prompts_of("ab", add_special_tokens=False)
    assert asked == [plain | {"add_special_tokens": False}]


async def test_a_text_that_is_cut_is_echoed_as_it_is_kept() -> None:
    cut = Truncation(num_tokens=2)
    texts, ids, _ = await prompts_of(["abc", "d", "ef"], cut)
    assert (texts, ids) == (["bc", "d", "ef"], [[98, 99], [100], [101, 102]])
    assert (await prompts_of([5, 6, 7], cut))[:2] == ([None], [[6, 7]])


async def test_how_many_prompts_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MAX_PROMPTS", 2)
    assert len((await prompts_of(["a", "b"]))[0]) == 2
    for given, told in (
        ([], "prompt is empty: it must have at least one entry"),
        (["a", "b", "c"], "there may be at most 2 prompts, got 3"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await prompts_of(given)
        assert (str(caught.value), caught.value.field) == (told, "prompt")


@pytest.mark.parametrize(
    ("fields", "normalize"),
    [
        ({}, None),
        ({"normalize": False}, False),
        ({"use_activation": True}, True),
        ({"use_activation": False, "normalize": True}, False),
    ],
)
def test_how_an_embedding_is_pooled(fields: Any, normalize: bool | None) -> None:
    params = _pooling_of(EmbeddingBody.model_validate({"input": "a", "dimensions": 5} | fields))
    assert (params.task, params.normalizes, params.dimensions) == ("embed", normalize, 5)
