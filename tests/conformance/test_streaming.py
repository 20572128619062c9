"""A stream is the whole answer in pieces: text, finish reason, usage, tokens and log probabilities."""

from typing import Any

import pytest

from tests.conformance.api import CHAT, COMPLETIONS, MODEL, PROMPT, QUESTION, Api, Json, chat_body

VARIANTS: dict[str, Json] = {
    "greedy": {},
    "to its end": {"max_tokens": 60},
    "one token": {"max_tokens": 1},
    "sampled": {"temperature": 1.0, "seed": 1},
    "hot": {"temperature": 2.0, "seed": 2, "max_tokens": 60},
    "top_p": {"temperature": 1.0, "top_p": 0.8, "seed": 3},
    "top_k": {"temperature": 1.0, "top_k": 20, "seed": 4},
    "min_p": {"temperature": 1.0, "min_p": 0.05, "seed": 5},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "max_tokens": 30},
    "a stop string": {"stop": ["a"], "max_tokens": 40},
    "a stop string that is kept": {"stop": ["a"], "include_stop_str_in_output": True, "max_tokens": 40},
    "a long stop string": {"stop": [" was a l", " had a ", "named"], "max_tokens": 60},
    "a stop that never comes": {"stop": ["\u2603"], "max_tokens": 40},
    "no end token": {"ignore_eos": True, "max_tokens": 80},
    "min_tokens": {"min_tokens": 20, "max_tokens": 30},
    "a bias": {"logit_bias": {"311": 5.0}, "max_tokens": 20},
    "special tokens": {"skip_special_tokens": False, "max_tokens": 60},
    "three choices": {"n": 3, "temperature": 1.0, "seed": 6},
    "hot bytes": {"temperature": 2.0, "seed": 7, "allowed_token_ids": list(range(4, 260)), "max_tokens": 60},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_the_pieces_make_the_whole(api: Api, path: str, fields: Json) -> None:
    fields = {"return_token_ids": True, **fields}
    if path == CHAT:
        body = chat_body(QUESTION, **fields)
        whole = api.chat(QUESTION, **fields)
        texts = [choice["message"]["content"] for choice in whole["choices"]]
    else:
        body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
        whole = api.complete(**fields)
        texts = [choice["text"] for choice in whole["choices"]]
    stream = api.stream(path, {**body, "stream_options": {"include_usage": True}})
    for index, choice in enumerate(whole["choices"]):
        assert stream.text(index) == texts[index]
        assert stream.finish_reason(index) == choice["finish_reason"]
        parts = stream.choices(index)
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        token_ids = [token_id for part in parts for token_id in part.get("token_ids") or []]
        assert token_ids == choice["token_ids"]
    assert stream.usage == whole["usage"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_log_probabilities_are_streamed(api: Api, path: str) -> None:
    if path == CHAT:
        body = chat_body(logprobs=True, top_logprobs=3)
        whole = api.chat(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
        parts = api.stream(path, body).choices()
        streamed = [entry for part in parts if part.get("logprobs") for entry in part["logprobs"]["content"]]
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
        close = [(one["logprob"], other["logprob"]) for one, other in zip(streamed, whole, strict=True)]
    else:
        whole = api.complete(logprobs=3)["choices"][0]["logprobs"]
        body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 3}
        pieces = [part["logprobs"] for part in api.stream(path, body).choices() if part["logprobs"]]
        for field in ("tokens", "text_offset"):
            assert [entry for piece in pieces for entry in piece[field]] == whole[field]
        streamed = [entry for piece in pieces for entry in piece["token_logprobs"]]
        close = list(zip(streamed, whole["token_logprobs"], strict=True))
    for one, other in close:
        assert one == pytest.approx(other, abs=1e-3)


def test_the_first_chunk_of_a_chat_has_the_role(api: Api) -> None:
    stream = api.stream(CHAT, chat_body())
    first, *others = stream.choices()
    assert first["delta"]["role"] == "assistant"
    assert not any(part["delta"].get("role") for part in others)
    assert not first["delta"].get("content")


def test_every_choice_of_a_chat_has_its_role_once(api: Api) -> None:
    stream = api.stream(CHAT, chat_body(n=3, temperature=1))
    for index in range(3):
        roles = [part["delta"].get("role") for part in stream.choices(index)]
        assert [role for role in roles if role] == ["assistant"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_usage_comes_only_when_asked_for(api: Api, path: str) -> None:
    stream = api.stream(path, chat_body() if path == CHAT else {"model": MODEL, "prompt": PROMPT})
    assert not any(chunk.get("usage") for chunk in stream.chunks)
    assert all(chunk["choices"] for chunk in stream.chunks)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_usage_comes_in_a_chunk_of_its_own_at_the_end(api: Api, path: str) -> None:
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": PROMPT}
    stream = api.stream(path, {**body, "stream_options": {"include_usage": True}})
    *others, last = stream.chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert not any(chunk.get("usage") for chunk in others)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_continuous_usage_grows_to_the_last(api: Api, path: str) -> None:
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": PROMPT}
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = api.stream(path, {**body, "ignore_eos": True, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks if chunk.get("usage")]
    assert len(counts) > 3
    assert counts == sorted(counts)
    assert stream.usage is not None
    assert counts[-1] == stream.usage["completion_tokens"]


def test_prompts_of_one_stream_are_told_apart_by_index(api: Api) -> None:
    prompts = [PROMPT, "The dog", "A cat"]
    body: dict[str, Any] = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 8}
    stream = api.stream(COMPLETIONS, body)
    for index, prompt in enumerate(prompts):
        assert stream.text(index) == api.text(prompt=prompt)


def test_echo_is_the_beginning_of_the_stream(api: Api) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "echo": True}
    stream = api.stream(COMPLETIONS, body)
    assert stream.text() == PROMPT + api.text()
    assert stream.choices()[0]["text"].startswith(PROMPT)


def test_no_piece_holds_a_broken_character(api: Api) -> None:
    """The tokens of an emoji hold parts of its bytes; pieces of the stream never do."""
    fields = {"temperature": 1.0, "seed": 8, "max_tokens": 80, "allowed_token_ids": api.token_ids("é日本🙂")}
    whole = api.text(**fields)
    stream = api.stream(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, **fields})
    assert stream.text() == whole
    assert len(whole) > 5
    pieces = [part["text"] for part in stream.choices()]
    whole.encode()
    assert "".join(pieces).count("\ufffd") == whole.count("\ufffd")


def test_a_stream_that_is_left_does_not_disturb_the_next(api: Api) -> None:
    body = {**chat_body(max_tokens=500, ignore_eos=True), "stream": True}
    expected = api.says()
    for _ in range(5):
        with api.http.stream("POST", CHAT, json=body) as response:
            next(response.iter_lines())
        assert api.says() == expected
