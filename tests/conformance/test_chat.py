"""/v1/chat/completions: messages in, a message out."""

from typing import Any

import pytest

from tests.conformance.api import CHAT, MAX_MODEL_LEN, MODEL, Api, Json, chat_body

CAPITAL = "What is the capital of France?"
PARIS = "The capital of France is Paris."


def test_a_question_is_answered(api: Api) -> None:
    answer = api.chat(CAPITAL, max_tokens=50)
    [choice] = answer["choices"]
    assert choice["message"]["content"] == PARIS
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None


CONTENTS: dict[str, list[Json]] = {
    "a list of one text part": [{"role": "user", "content": [{"type": "text", "text": CAPITAL}]}],
    "a name beside the content": [{"role": "user", "content": CAPITAL, "name": "anna"}],
    "an earlier turn": [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help you today?"},
        {"role": "user", "content": CAPITAL},
    ],
    "an assistant whose content is null": [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": CAPITAL},
    ],
}


@pytest.mark.parametrize("messages", CONTENTS.values(), ids=CONTENTS)
def test_a_conversation_may_hold(api: Api, messages: list[Json]) -> None:
    assert "Paris" in api.says(messages, max_tokens=50)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_the_roles_are_known(api: Api, role: str) -> None:
    api.chat([{"role": role, "content": "You are kind."}, {"role": "user", "content": "Hello!"}])


def test_the_developer_is_heard(api: Api) -> None:
    api.chat([{"role": "developer", "content": "You are kind."}, {"role": "user", "content": "Hello!"}])


def test_the_default_is_the_rest_of_the_context(api: Api) -> None:
    body = chat_body("Hello!", ignore_eos=True)
    del body["max_tokens"]
    usage = api.ok(CHAT, body)["usage"]
    assert usage["total_tokens"] == MAX_MODEL_LEN


def test_max_completion_tokens_is_max_tokens_by_its_new_name(api: Api) -> None:
    body = chat_body(max_completion_tokens=5, ignore_eos=True)
    del body["max_tokens"]
    assert api.ok(CHAT, body)["usage"]["completion_tokens"] == 5


def test_max_completion_tokens_comes_before_the_old_name(api: Api) -> None:
    assert api.chat(max_tokens=9, max_completion_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4


def test_max_completion_tokens_is_at_least_one(api: Api) -> None:
    api.refused(CHAT, chat_body(max_completion_tokens=-1), param="max_completion_tokens")


@pytest.mark.parametrize("n", [1, 3])
def test_n_messages(api: Api, n: int) -> None:
    answer = api.chat(n=n, temperature=1, seed=5, max_tokens=12)
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(contents)) == n


def test_the_template_is_that_of_the_tokenizer(api: Api) -> None:
    answer = api.chat("Hello!", return_token_ids=True)
    rendered = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    expected = api.ok("/tokenize", {"model": MODEL, "prompt": rendered, "add_special_tokens": False})["tokens"]
    prompt_token_ids = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids")
    assert prompt_token_ids == expected
    assert answer["usage"]["prompt_tokens"] == len(expected)


def test_a_final_message_is_continued(api: Api) -> None:
    messages = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": "The capital of France"}]
    content = api.says(messages, max_tokens=50, continue_final_message=True, add_generation_prompt=False)
    assert content == " is Paris."


def test_a_final_message_is_either_continued_or_answered(api: Api) -> None:
    messages = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": "The"}]
    api.refused(CHAT, chat_body(messages, continue_final_message=True, add_generation_prompt=True))


def test_echo_shows_the_beginning_of_a_continued_message(api: Api) -> None:
    messages = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": "The capital of France"}]
    fields: Json = {"max_tokens": 50, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    assert api.says(messages, **fields) == PARIS
    assert api.stream(CHAT, chat_body(messages, **fields)).text() == PARIS


def test_the_question_is_not_part_of_an_echo(api: Api) -> None:
    assert api.says(CAPITAL, max_tokens=50, echo=True) == PARIS


def test_the_end_token_is_shown_when_asked_for(api: Api) -> None:
    fields: Json = {"max_tokens": 50, "skip_special_tokens": False}
    assert api.says(CAPITAL, **fields) == PARIS
    assert api.says(CAPITAL, **fields, include_stop_str_in_output=True) == PARIS + "<|im_end|>"


OPTIONAL = [
    *("frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_completion_tokens", "n", "presence_penalty"),
    *("response_format", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "tools", "tool_choice"),
    *("user", "store", "metadata", "service_tier", "parallel_tool_calls", "reasoning_effort", "modalities"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "allowed_token_ids", "bad_words", "priority"),
    *("cache_salt", "request_id", "truncate_prompt_tokens", "prompt_logprobs", "structured_outputs", "vllm_xargs"),
    *("chat_template", "chat_template_kwargs", "documents", "return_token_ids"),
]


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_is_as_good_as_absent(api: Api, field: str) -> None:
    api.chat(**{"max_tokens": 2, field: None})


HARMLESS: list[tuple[str, Any]] = [
    ("user", "anna"),
    ("store", False),
    ("metadata", {"a": "b"}),
    ("service_tier", "auto"),
    ("safety_identifier", "x"),
    ("prompt_cache_key", "x"),
    ("response_format", {"type": "text"}),
    ("modalities", ["text"]),
    ("nobody_knows_this", 1),
]


@pytest.mark.parametrize(("field", "value"), HARMLESS, ids=[field for field, _ in HARMLESS])
def test_what_changes_nothing_is_accepted(api: Api, field: str, value: Any) -> None:
    assert api.says(**{field: value}) == api.says()
