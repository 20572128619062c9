"""Log probabilities: their forms in completions and chats, and that they are what they say."""

import math
from typing import Any

import pytest

from tests.conformance.api import COMPLETIONS, MODEL, PROMPT, Api, Json


@pytest.mark.parametrize("number", [0, 1, 5, 20])
def test_the_form_in_completions(api: Api, number: int) -> None:
    answer = api.complete(logprobs=number)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    count = answer["usage"]["completion_tokens"]
    assert {len(logprobs[field]) for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs")} == {count}
    assert "".join(logprobs["tokens"]) == choice["text"]
    starts = [sum(map(len, logprobs["tokens"][:position])) for position in range(count)]
    assert logprobs["text_offset"] == starts
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value <= 0
        if number == 0:
            assert not top or set(top) == {token}
        else:
            assert top[token] == value
            assert max(top.values()) == value, "a greedy token is the likeliest"
            assert number <= len(top) <= number + 1


@pytest.mark.parametrize("number", [0, 1, 5, 20])
def test_the_form_in_chats(api: Api, number: int) -> None:
    answer = api.chat(logprobs=True, top_logprobs=number)
    [choice] = answer["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == number
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1.001
        if number:
            assert entry["top_logprobs"][0]["token"] == entry["token"]
            assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]


def test_logprobs_without_a_number_of_alternatives(api: Api) -> None:
    entries = api.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


@pytest.mark.parametrize("fields", [{}, {"logprobs": None}, {"logprobs": False}], ids=str)
def test_none_are_given_unless_asked_for(api: Api, fields: Json) -> None:
    assert api.chat(**fields)["choices"][0]["logprobs"] is None


def test_they_are_raw(api: Api) -> None:
    """Neither temperature nor filters nor a bias changes the probabilities that are reported."""
    plain = api.complete(logprobs=5, max_tokens=1)["choices"][0]["logprobs"]["top_logprobs"][0]
    for fields in ({"temperature": 2.0, "top_k": 1}, {"top_p": 0.1, "temperature": 0.3}, {"logit_bias": {"9": -80}}):
        other = api.complete(**{"logprobs": 5, "max_tokens": 1, **fields})["choices"][0]["logprobs"]["top_logprobs"][0]
        for token, value in plain.items():
            assert other[token] == pytest.approx(value, abs=1e-3)


def test_a_sampled_token_outside_the_top_is_listed_too(api: Api) -> None:
    logprobs = api.complete(logprobs=1, temperature=2.0, seed=5, max_tokens=40)["choices"][0]["logprobs"]
    assert any(len(top) == 2 for top in logprobs["top_logprobs"])
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert token in top


def test_a_token_of_a_part_of_a_character_has_its_bytes(api: Api) -> None:
    token_ids = api.token_ids("🙂")
    answer = api.chat(
        logprobs=True, allowed_token_ids=token_ids, temperature=2.0, seed=1, max_tokens=30, ignore_eos=True
    )
    entries = answer["choices"][0]["logprobs"]["content"]
    assert any(entry["bytes"] and entry["bytes"][0] >= 0x80 for entry in entries)
    whole = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert whole.decode(errors="replace") == answer["choices"][0]["message"]["content"]


def test_tokens_may_be_given_as_ids(api: Api) -> None:
    answer = api.complete(logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    assert answer["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in answer["token_ids"]]
    entries = api.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(entry["token"].startswith("token_id:") for entry in entries["content"])
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries["content"])


def test_each_choice_has_its_own(api: Api) -> None:
    for choice in api.complete(n=3, temperature=1.5, seed=1, logprobs=2)["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_stop_strings_do_not_change_their_number(api: Api) -> None:
    text = api.text(max_tokens=20)
    answer = api.complete(max_tokens=20, logprobs=1, stop=[text[9:14]])
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 21}, {"prompt_logprobs": -2}, {"prompt_logprobs": 1, "stream": True}]
)
def test_prompt_logprobs_are_bounded_and_not_streamed(api: Api, fields: Json) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, **fields}, param="prompt_logprobs")


def close(one: list[Any], other: list[Any]) -> bool:
    return all(
        (left is None and right is None) or left == pytest.approx(right, abs=0.02)
        for left, right in zip(one, other, strict=True)
    )


def test_echo_scores_the_prompt(api: Api) -> None:
    """What evaluation harnesses are built on: the prompt's own tokens, the first of which has no probability."""
    answer = api.complete(echo=True, logprobs=2, max_tokens=4)
    logprobs = answer["choices"][0]["logprobs"]
    num_prompt_tokens = answer["usage"]["prompt_tokens"]
    assert len(logprobs["tokens"]) == num_prompt_tokens + answer["usage"]["completion_tokens"]
    assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [
        sum(map(len, logprobs["tokens"][:position])) for position in range(len(logprobs["tokens"]))
    ]


def test_echo_of_no_new_token_scores_the_prompt_alone(api: Api) -> None:
    whole = api.complete(echo=True, logprobs=1, max_tokens=4)
    scored = api.complete(echo=True, logprobs=1, max_tokens=0)
    num_prompt_tokens = scored["usage"]["prompt_tokens"]
    values = scored["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == num_prompt_tokens
    assert close(values, whole["choices"][0]["logprobs"]["token_logprobs"][:num_prompt_tokens])


def test_the_score_of_a_text_is_the_same_as_prompt_and_as_output(api: Api) -> None:
    generated = api.complete(logprobs=0, max_tokens=12, return_token_ids=True)["choices"][0]
    prompt = api.token_ids(PROMPT)
    scored = api.complete(prompt=prompt + generated["token_ids"], echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert close(scored["logprobs"]["token_logprobs"][len(prompt) :], generated["logprobs"]["token_logprobs"])


def test_prompt_logprobs(api: Api) -> None:
    answer = api.complete(prompt_logprobs=2, max_tokens=1)
    entries = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    token_ids = api.token_ids(PROMPT)
    assert len(entries) == len(token_ids)
    assert entries[0] is None
    for token_id, entry in zip(token_ids[1:], entries[1:], strict=True):
        assert str(token_id) in entry
        assert 2 <= len(entry) <= 3
        for value in entry.values():
            assert {"logprob", "rank", "decoded_token"} <= value.keys()
            assert value["logprob"] <= 0
            assert value["rank"] >= 1
