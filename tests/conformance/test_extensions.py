"""What vLLM's users ask for beyond OpenAI's fields."""

from typing import Any

import pytest

from tests.conformance.api import CHAT, COMPLETIONS, MODEL, PROMPT, Api, Json, chat_body


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_prompt_is_truncated_to_its_last_tokens(api: Api, count: int) -> None:
    token_ids = api.token_ids("The dog and the cat went to the river.")
    answer = api.complete(prompt=token_ids, truncate_prompt_tokens=count)
    assert answer["usage"]["prompt_tokens"] == count
    assert answer["choices"][0]["text"] == api.text(prompt=token_ids[-count:])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_minus_one_truncates_to_the_context(api: Api, path: str) -> None:
    body = chat_body("dog " * 3000) if path == CHAT else {"model": MODEL, "prompt": "dog " * 3000}
    usage = api.ok(path, {**body, "max_tokens": 3, "truncate_prompt_tokens": -1})["usage"]
    assert usage["prompt_tokens"] > 900
    assert usage["total_tokens"] <= 1024


def test_prompt_logprobs_of_a_chat(api: Api) -> None:
    answer = api.chat("Hello!", prompt_logprobs=1)
    entries = answer["prompt_logprobs"]
    assert len(entries) == answer["usage"]["prompt_tokens"]
    assert entries[0] is None
    assert all(entry for entry in entries[1:])


def test_a_scored_prompt_is_streamed(api: Api) -> None:
    body: Json = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "echo": True, "logprobs": 1, "model": MODEL}
    parts = api.stream(COMPLETIONS, body).choices()
    tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
    assert "".join(tokens) == PROMPT + api.text(max_tokens=4)


@pytest.mark.parametrize("priority", [-5, 0, 5])
def test_a_priority_changes_no_answer(api: Api, priority: int) -> None:
    assert api.text(priority=priority) == api.text()


def test_a_priority_may_come_in_a_header(api: Api) -> None:
    response = api.http.post(CHAT, json=chat_body(), headers={"X-Vllm-Priority": "3"})
    assert response.status_code == 200


def test_a_request_id_may_come_in_the_body(api: Api) -> None:
    assert "mine-42" in api.complete(request_id="mine-42")["id"]


def test_parameters_of_plugins_are_accepted(api: Api) -> None:
    assert api.text(vllm_xargs={"a": 1, "b": "x", "c": [1, 2]}) == api.text()


@pytest.mark.parametrize("value", [5, "a", [1]], ids=str)
def test_parameters_of_plugins_are_an_object(api: Api, value: Any) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "vllm_xargs": value}, param="vllm_xargs")


def test_variables_of_the_template_are_accepted(api: Api) -> None:
    assert api.says(chat_template_kwargs={"enable_thinking": False}) == api.says()


def test_a_template_of_the_request_is_not_trusted(api: Api) -> None:
    api.refused(CHAT, chat_body(chat_template="{{ messages }}"), param="chat_template")


def test_a_bad_word_of_several_tokens_never_appears(api: Api) -> None:
    text = api.text(max_tokens=24)
    words = " ".join(text.split()[:3])
    assert f" {words} " in text
    assert f" {words} " not in api.text(max_tokens=24, bad_words=[words])


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_embeds"])
def test_what_is_not_served_is_refused_by_name(api: Api, field: str) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, field: "a"}, param=field)


@pytest.mark.parametrize("seconds", [0, -1, "soon"])
def test_a_time_limit_is_positive(api: Api, seconds: Any) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "timeout": seconds}, param="timeout")


def test_a_request_that_takes_too_long_is_ended(api: Api) -> None:
    body: Json = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "timeout": 0.01}
    error = api.refused(COMPLETIONS, body, status=504)
    assert "0.01" in error["message"]
