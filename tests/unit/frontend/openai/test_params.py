"""Requests to SamplingParams."""

import pytest

from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_frontend.openai.protocol import CompletionBody
from pagoda_frontend.requests.params import (
    SamplingDefaults,
    check_sampling_params,
    check_supported,
    fit_to_context,
    make_sampling_params,
    sampling_defaults,
)


def body(**fields: object) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "x", **fields})


def test_the_request_goes_before_the_models_defaults_and_those_before_openais() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_k=20)
    asked = make_sampling_params(body(temperature=0.2), defaults=defaults, logprobs=None, max_tokens=16)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.2, 20, 1.0)


def test_max_new_tokens_caps_every_request() -> None:
    defaults = SamplingDefaults(max_new_tokens=8)
    for asked, expected in ((None, 8), (5, 5), (100, 8)):
        params = make_sampling_params(body(), defaults=defaults, logprobs=None, max_tokens=asked)
        assert params.max_tokens == expected


def test_a_generation_config_of_wrong_types_is_silent() -> None:
    text = '{"temperature": "warm", "top_p": true, "top_k": 2.5, "min_p": 0.1, "do_sample": true}'
    assert sampling_defaults(text) == SamplingDefaults(min_p=0.1)
    assert sampling_defaults("") == SamplingDefaults()


NO_TRANSFER = {"kv_transfer_params": {"do_remote_decode": False}}
"""Of routers of disaggregated engines: no engine here takes another one's cache over, and it changes no answer."""


@pytest.mark.parametrize(
    "fields", [{"tools": None}, {"best_of": 1}, {"suffix": ""}, {"tool_choice": "none"}, NO_TRANSFER]
)
def test_fields_that_ask_for_nothing_are_fine(fields: dict[str, object]) -> None:
    check_supported(body(**fields))


@pytest.mark.parametrize("name", ["prompt_embeds", "repetition_detection"])
def test_fields_that_are_not_there_yet_are_named(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_supported(body(**{name: [1]}))
    assert caught.value.field == name


def test_max_tokens_is_cut_to_what_the_prompt_leaves() -> None:
    params = SamplingParams(max_tokens=100)
    for num_prompt_tokens, expected in ((10, 54), (63, 1)):
        fitted = fit_to_context(params, num_prompt_tokens=num_prompt_tokens, max_model_len=64, field="prompt")
        assert fitted.max_tokens == expected
    with pytest.raises(RequestTooLong, match="maximum context length is 64 tokens, but the prompt has 64 tokens"):
        fit_to_context(params, num_prompt_tokens=64, max_model_len=64, field="prompt")
    with pytest.raises(InvalidRequest, match="empty"):
        fit_to_context(params, num_prompt_tokens=0, max_model_len=64, field="prompt")


def test_the_whole_vocabulary_of_logprobs_must_be_allowed() -> None:
    params = SamplingParams(logprobs=-1)
    check_sampling_params(params, vocab_size=10, max_logprobs=-1)
    with pytest.raises(InvalidRequest) as caught:
        check_sampling_params(params, vocab_size=21, max_logprobs=20)
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize("value", [16, 16.0])
def test_json_has_one_kind_of_number(value: float) -> None:
    assert body(max_tokens=value).max_tokens == 16
