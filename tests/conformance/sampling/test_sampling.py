"""Sampling parameters: what each of them must do to an answer, alone and in company."""

from typing import Any

import pytest

from tests.conformance.api import COMPLETIONS, EOS_TOKEN_IDS, MODEL, PROMPT, Api, Json

LIKE_GREEDY: dict[str, Json] = {
    "temperature 0": {"temperature": 0},
    "temperature 0.0": {"temperature": 0.0},
    "a temperature too small to matter": {"temperature": 1e-6},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_k 1 and hot": {"temperature": 2.0, "top_k": 1},
    "a tiny top_p": {"temperature": 1.0, "top_p": 1e-9},
    "min_p 1": {"temperature": 1.0, "min_p": 1.0},
    "greedy with filters": {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    "greedy with a seed": {"temperature": 0, "seed": 12345},
    "no bias at all": {"logit_bias": {}},
    "a bias of nothing": {"logit_bias": {"5": 0}},
    "neutral penalties": {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1},
    "every token allowed": {"allowed_token_ids": list(range(3072))},
    "top_k off": {"top_k": 0},
    "top_k off, the other way": {"top_k": -1},
    "min_tokens reached anyway": {"min_tokens": 3},
}


@pytest.mark.parametrize("fields", LIKE_GREEDY.values(), ids=LIKE_GREEDY)
def test_it_is_the_greedy_answer(api: Api, fields: Json) -> None:
    assert api.text(**fields, max_tokens=16) == api.text(max_tokens=16)


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**63 - 1])
def test_a_seed_repeats_itself(api: Api, seed: int) -> None:
    fields = {"temperature": 1.0, "seed": seed, "max_tokens": 24}
    assert api.text(**fields) == api.text(**fields)


def test_seeds_differ(api: Api) -> None:
    texts = {api.text(temperature=1.0, seed=seed, max_tokens=24) for seed in range(8)}
    assert len(texts) == 8


def test_without_a_seed_answers_differ(api: Api) -> None:
    assert len({api.text(temperature=1.0, max_tokens=24) for _ in range(6)}) > 1


def test_the_choices_of_a_seed_differ_and_repeat(api: Api) -> None:
    first, second = (
        [choice["text"] for choice in api.complete(temperature=1.0, seed=9, n=4, max_tokens=24)["choices"]]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 4


def test_best_of_returns_the_likeliest(api: Api) -> None:
    fields = {"temperature": 1.0, "seed": 9, "max_tokens": 12, "logprobs": 0}

    def mean_logprob(choice: Json) -> float:
        values: list[float] = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    every = api.complete(**fields, n=6)["choices"]
    best = api.complete(**fields, n=2, best_of=6)["choices"]
    assert len(best) == 2
    assert mean_logprob(best[0]) == pytest.approx(max(map(mean_logprob, every)), abs=1e-3)
    assert mean_logprob(best[0]) >= mean_logprob(best[1])


def test_best_of_is_at_least_n(api: Api) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "n": 3, "best_of": 2}, param="best_of")


def test_best_of_cannot_be_streamed(api: Api) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "best_of": 2, "stream": True}, param="best_of")


@pytest.mark.parametrize("token_id", [5, 300, 3071])
def test_a_bias_of_100_is_a_command(api: Api, token_id: int) -> None:
    answer = api.complete(logit_bias={str(token_id): 100}, max_tokens=4, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [token_id] * 4


def test_a_bias_of_minus_100_is_a_ban(api: Api) -> None:
    first = api.complete(max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    for temperature in (0, 1.5):
        answer = api.complete(
            logit_bias={str(first): -100}, max_tokens=20, temperature=temperature, return_token_ids=True
        )
        assert first not in answer["choices"][0]["token_ids"]


def test_a_bias_beyond_100_is_cut(api: Api) -> None:
    assert api.text(logit_bias={"5": 1000}, max_tokens=3) == api.text(logit_bias={"5": 100}, max_tokens=3)


@pytest.mark.parametrize("temperature", [0, 1.0, 2.0])
def test_only_allowed_tokens_are_sampled(api: Api, temperature: float) -> None:
    allowed = [100, 200, 300, 301]
    answer = api.complete(
        allowed_token_ids=allowed, temperature=temperature, max_tokens=30, return_token_ids=True, ignore_eos=True
    )
    assert set(answer["choices"][0]["token_ids"]) <= set(allowed)


def test_a_bad_word_never_appears(api: Api) -> None:
    text = api.text(max_tokens=24)
    word = text.split()[2]
    assert word not in api.text(max_tokens=24, bad_words=[word]).split()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_ends_the_text(api: Api, stream: bool) -> None:
    token_ids = api.complete(max_tokens=8, return_token_ids=True)["choices"][0]["token_ids"]
    stop = token_ids[4]
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "stop_token_ids": [stop]}
    if stream:
        choice = api.stream(COMPLETIONS, body).choices()[-1]
    else:
        answer = api.ok(COMPLETIONS, body)
        [choice] = answer["choices"]
        assert answer["usage"]["completion_tokens"] == token_ids.index(stop) + 1
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop


def test_min_tokens_keeps_end_and_stop_tokens_away(api: Api) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert api.complete(prompt=prompt, max_tokens=50)["usage"]["completion_tokens"] < 15
    answer = api.complete(prompt=prompt, max_tokens=50, min_tokens=30, return_token_ids=True)
    token_ids = answer["choices"][0]["token_ids"]
    assert len(token_ids) >= 30
    assert not EOS_TOKEN_IDS & set(token_ids[:30])


def test_ignore_eos_goes_on_to_the_length(api: Api) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    answer = api.complete(prompt=prompt, max_tokens=50, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 50


def repeats(token_ids: list[int]) -> int:
    return len(token_ids) - len(set(token_ids))


PENALTIES: dict[str, Json] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
}


@pytest.mark.parametrize("fields", PENALTIES.values(), ids=PENALTIES)
def test_a_penalty_lowers_the_number_of_repeated_tokens(api: Api, fields: Json) -> None:
    common: Json = {"max_tokens": 80, "ignore_eos": True, "return_token_ids": True}
    plain = api.complete(**common)["choices"][0]["token_ids"]
    punished = api.complete(**common, **fields)["choices"][0]["token_ids"]
    assert repeats(punished) < repeats(plain)


def test_a_repetition_penalty_counts_the_prompt(api: Api) -> None:
    """After a prompt that repeats one token, the model would continue with it; the penalty lets it do so less often."""
    prompt = api.token_ids(" dog") * 20
    common: Json = {"prompt": prompt, "max_tokens": 1, "logprobs": 5}
    plain = api.complete(**common)["choices"][0]["text"]
    assert plain == " dog"
    assert api.complete(**common, repetition_penalty=10.0)["choices"][0]["text"] != " dog"
    assert api.complete(**common, presence_penalty=2.0)["choices"][0]["text"] == " dog", "counts the output alone"


COMBINED: list[Json] = [
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 1},
    {"temperature": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "seed": 2},
    {"temperature": 1.0, "logit_bias": {"5": -50, "300": 2}, "bad_words": ["dog"], "top_k": 100, "seed": 3},
    {"temperature": 1.0, "allowed_token_ids": list(range(4, 1500)), "min_tokens": 10, "top_p": 0.95, "seed": 4},
    {"temperature": 0.5, "n": 3, "logprobs": 5, "stop": ["."], "seed": 5},
    {"temperature": 1.0, "n": 2, "best_of": 4, "echo": True, "seed": 6},
]


@pytest.mark.parametrize("fields", COMBINED, ids=range(len(COMBINED)))
def test_all_together_repeat_themselves(api: Api, fields: Json) -> None:
    def texts(answer: Json) -> list[Any]:
        return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]

    assert texts(api.complete(max_tokens=30, **fields)) == texts(api.complete(max_tokens=30, **fields))
