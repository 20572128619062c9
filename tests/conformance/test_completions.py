"""/v1/completions as OpenAI's reference and vLLM's extensions describe it."""

from typing import Any

import pytest

from tests.conformance.api import COMPLETIONS, EOS_TOKEN_IDS, MAX_MODEL_LEN, MODEL, PROMPT, Api

PROMPT_FORMS = ["text", "texts", "tokens", "lists of tokens"]


def in_form(api: Api, text: str, form: str) -> Any:
    token_ids = api.token_ids(text)
    return {"text": text, "texts": [text], "tokens": token_ids, "lists of tokens": [token_ids]}[form]


@pytest.mark.parametrize("form", PROMPT_FORMS)
def test_every_form_of_prompt_gives_the_same_answer(api: Api, form: str) -> None:
    answer = api.complete(prompt=in_form(api, PROMPT, form))
    assert answer["choices"][0]["text"] == api.text()
    assert answer["usage"]["prompt_tokens"] == len(api.token_ids(PROMPT))


@pytest.mark.parametrize("form", PROMPT_FORMS)
def test_echo_gives_the_prompt_back(api: Api, form: str) -> None:
    assert api.text(prompt=in_form(api, PROMPT, form), echo=True) == PROMPT + api.text()


def test_the_default_is_16_tokens(api: Api) -> None:
    answer = api.ok(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 33])
def test_max_tokens_is_exact_where_nothing_else_ends_the_text(api: Api, max_tokens: int) -> None:
    answer = api.complete(max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["stop_reason"] is None


def test_max_tokens_beyond_the_context_is_cut_to_it(api: Api) -> None:
    answer = api.complete(prompt=[5] * 1000, max_tokens=500, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_choices_for_each_prompt_in_order(api: Api, n: int) -> None:
    prompts = [PROMPT, "The", "A dog"]
    answer = api.complete(prompt=prompts, n=n, temperature=1, seed=3, echo=True)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == n * len(prompts)
    for number, text in enumerate(texts):
        assert text.startswith(prompts[number // n])
    assert answer["usage"]["prompt_tokens"] == sum(len(api.token_ids(prompt)) for prompt in prompts)


def test_usage_counts_the_tokens_of_all_choices(api: Api) -> None:
    answer = api.complete(n=3, temperature=1, max_tokens=5, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 15
    assert answer["usage"]["prompt_tokens"] == len(api.token_ids(PROMPT))


def test_return_token_ids_of_prompt_and_output(api: Api) -> None:
    answer = api.complete(return_token_ids=True)
    [choice] = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    prompt_token_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    assert prompt_token_ids == api.token_ids(PROMPT)
    detokenized = api.ok("/detokenize", {"model": MODEL, "tokens": choice["token_ids"]})["prompt"]
    assert detokenized == choice["text"]


def test_an_end_token_ends_the_text_and_is_not_part_of_it(api: Api) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    answer = api.complete(prompt=prompt, max_tokens=50, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["token_ids"][-1] in EOS_TOKEN_IDS
    assert choice["text"] == "The capital of France is Paris."


def test_special_tokens_are_part_of_the_text_when_asked_for(api: Api) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    fields = {"prompt": prompt, "max_tokens": 50, "skip_special_tokens": False}
    assert api.text(**fields) == "The capital of France is Paris.", "what ended the text is not part of it"
    assert api.text(**fields, include_stop_str_in_output=True) == "The capital of France is Paris.<|im_end|>"
    forced = {**fields, "max_tokens": 2, "logit_bias": {"3": 100}}
    assert api.text(**forced) == "<|pad|><|pad|>"
    assert api.text(**{**forced, "skip_special_tokens": True}) == ""


OPTIONAL = [
    *("best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed"),
    *("stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("allowed_token_ids", "bad_words", "priority", "cache_salt", "request_id", "truncate_prompt_tokens"),
    *("prompt_logprobs", "response_format", "structured_outputs", "vllm_xargs", "return_token_ids"),
]


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_is_as_good_as_absent(api: Api, field: str) -> None:
    api.complete(**{"max_tokens": 2, field: None})


def test_unknown_fields_are_ignored(api: Api) -> None:
    assert api.text(nobody_knows_this={"a": [1]}) == api.text()


def test_a_suffix_is_refused(api: Api) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "suffix": " The end."}, param="suffix")


def test_the_same_prompt_twice_gives_the_same_answer_from_the_prefix_cache(api: Api) -> None:
    prompt = "The dog and the cat went to the river. " * 12
    first = api.complete(prompt=prompt, max_tokens=12)["choices"]
    assert api.complete(prompt=prompt, max_tokens=12)["choices"] == first
    assert api.complete(prompt=prompt, max_tokens=12, cache_salt="other")["choices"] == first


def test_a_special_token_in_the_text_of_a_prompt_is_one_token(api: Api) -> None:
    assert api.complete(prompt="<|im_start|>")["usage"]["prompt_tokens"] == 1


def test_beam_search_finds_a_text_and_is_deterministic(api: Api) -> None:
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 6}
    texts = [choice["text"] for choice in api.complete(**fields)["choices"]]
    assert len(set(texts)) == 3
    assert [choice["text"] for choice in api.complete(**fields)["choices"]] == texts


def test_echo_of_no_new_token_is_the_prompt(api: Api) -> None:
    answer = api.complete(echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"
