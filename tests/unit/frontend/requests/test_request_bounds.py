"""Bounds of what requests ask for: the vocabulary, log probabilities, the context, cache salts, resume ids."""

from typing import Any

import pytest

from pagoda_common.engine.stream import Known
from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.outputs import SequenceDelta
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_frontend.openai.protocol import CompletionBody
from pagoda_frontend.requests.event_ids import EventIds, place_of, with_id
from pagoda_frontend.requests.params import (
    SamplingDefaults,
    check_cache_salt,
    check_prompt_logprobs,
    check_sampling_params,
    check_supported,
    check_token_ids,
    fit_to_context,
    make_sampling_params,
)


def field_of(call: Any, *args: Any, **options: Any) -> str | None:
    """The field that a call refuses; None when it takes all."""
    try:
        call(*args, **options)
    except InvalidRequest as error:
        return error.field
    return None


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"])
def test_token_ids_are_of_the_vocabulary(name: str) -> None:
    for token_id, wanted in ((99, None), (100, name)):
        value: Any = {token_id: 1.0} if name == "logit_bias" else [0, token_id]
        assert field_of(check_sampling_params, params(**{name: value}), vocab_size=100, max_logprobs=20) == wanted


def test_bad_words_are_of_the_vocabulary() -> None:
    for token_id, wanted in ((99, None), (100, "bad_words_token_ids")):
        asked = params(bad_words_token_ids=[[0], [1, token_id]])
        assert field_of(check_sampling_params, asked, vocab_size=100, max_logprobs=-1) == wanted
    assert field_of(check_token_ids, [], vocab_size=1, field="x") is None
    assert field_of(check_token_ids, [-1], vocab_size=9, field="x") == "x"
    assert field_of(check_token_ids, [0, 8], vocab_size=9, field="x") is None


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_are_bounded_by_the_server(name: str) -> None:
    for value, bound, is_good in (
        *((20, 20, True), (21, 20, False), (-1, 20, False), (0, 0, True), (1, 0, False)),
        *((-1, -1, True), (-1, 100, True), (-1, 99, False), (999, -1, True), (None, 0, True)),
    ):
        found = field_of(check_sampling_params, params(**{name: value}), vocab_size=100, max_logprobs=bound)
        assert found == (None if is_good else name), (value, bound)


def test_an_answer_holds_one_million_log_probabilities_of_a_prompt() -> None:
    most = 1024**2
    for value, num_tokens, vocab_size, is_good in (
        (3, most // 4, 10, True),
        (3, most // 4 + 1, 10, False),
        (0, most, 10, True),
        (0, most + 1, 10, False),
        (-1, 1024, 1023, True),
        (-1, 1024, 1024, False),
        (None, 10**9, 10**9, True),
    ):
        asked = params(prompt_logprobs=value)
        found = field_of(check_prompt_logprobs, asked, num_prompt_tokens=num_tokens, vocab_size=vocab_size)
        assert found == (None if is_good else "prompt_logprobs"), (value, num_tokens)


def test_an_output_is_cut_to_what_the_prompt_leaves() -> None:
    def fit(max_tokens: int | None, num_prompt_tokens: int) -> int | None:
        asked = params(max_tokens=max_tokens)
        return fit_to_context(asked, num_prompt_tokens=num_prompt_tokens, max_model_len=10, field="prompt").max_tokens

    assert (fit(None, 4), fit(5, 4), fit(6, 4), fit(7, 4), fit(1, 9), fit(9, 9)) == (6, 5, 6, 6, 1, 1)
    with pytest.raises(RequestTooLong, match=r"maximum context length is 10 tokens, but the prompt has 10"):
        fit(1, 10)
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        fit(1, 0)


@pytest.mark.parametrize(
    ("salt", "is_good"),
    [
        *((None, True), ("a", True), ("x" * 128, True), ("x" * 129, False), ("", False)),
        *((f"a{character}b", False) for character in "@/\\\0"),
    ],
)
def test_a_cache_salt_takes_its_bounds(salt: str | None, is_good: bool) -> None:
    assert field_of(check_cache_salt, salt) == (None if is_good else "cache_salt")


def test_options_that_do_not_go_together_are_refused() -> None:
    for fields, wanted in (
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": True}, None),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, None),
        ({"cache_salt": "a/b"}, "cache_salt"),
    ):
        body = CompletionBody.model_validate({"prompt": "x", **fields})
        assert field_of(check_supported, body) == wanted, fields


def test_each_field_goes_before_the_model_s_default_and_zero_is_a_value() -> None:
    defaults = SamplingDefaults(
        temperature=0.7, top_p=0.8, top_k=30, min_p=0.2, repetition_penalty=1.3, max_new_tokens=9
    )
    silent = make_sampling_params(
        CompletionBody.model_validate({"prompt": "x"}), defaults=defaults, logprobs=None, max_tokens=None
    )
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p) == (0.7, 0.8, 30, 0.2)
    assert (silent.repetition_penalty, silent.max_tokens) == (1.3, 9)
    asked = {"temperature": 0.5, "top_p": 0.6, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    body = CompletionBody.model_validate({"prompt": "x", **asked})
    told = make_sampling_params(body, defaults=defaults, logprobs=2, max_tokens=9, prompt_logprobs=3, n=4)
    assert {name: getattr(told, name) for name in asked} == asked
    assert (told.logprobs, told.prompt_logprobs, told.n, told.max_tokens) == (2, 3, 4, 9)
    searched = make_sampling_params(body, defaults=defaults, logprobs=None, max_tokens=9, is_search=True)
    assert (searched.temperature, searched.top_p, searched.min_p) == (1.0, 1.0, 0.0), "a search filters nothing"


def test_keys_of_a_bias_are_token_ids_and_extra_arguments_have_the_field_s_name() -> None:
    def make(**fields: Any) -> SamplingParams:
        body = CompletionBody.model_validate({"prompt": "x", **fields})
        return make_sampling_params(body, defaults=SamplingDefaults(), logprobs=None, max_tokens=1)

    assert make(logit_bias={"5": -2}).logit_bias == {5: -2.0}
    assert make(vllm_xargs={"a": 1}).extra_args == {"a": 1}
    assert make().extra_args is None
    assert field_of(make, logit_bias={"five": 1}) == "logit_bias"
    assert field_of(make, logprob_token_ids=[5]) == "logprob_token_ids"


def test_an_id_says_what_the_client_has_of_each_sequence() -> None:
    ids = EventIds(response_id="cmpl-1", n=3)
    assert ids.line() == b"id: cmpl-1:0,0,0\n"
    ids.advance(SequenceDelta(index=1, text="", token_ids=[5], offset=0, num_output_tokens=1))
    line = ids.advance(
        SequenceDelta(index=2, text="", token_ids=[5, 6], offset=0, num_output_tokens=2, finish_reason="stop")
    )
    assert line == b"id: cmpl-1:0,1,2f\n"
    assert ids.line(7) == b"id: cmpl-1:0,1,2f@7\n"
    place = place_of({"last-event-id": "cmpl-1:0,1,2f@7"})
    assert place is not None
    assert (place.key, place.num_events) == ("cmpl-1", 7)
    assert place.known == (Known(0, False), Known(1, False), Known(2, True))
    assert place_of({}) is None
    one = place_of({"last-event-id": "a:b:1"})
    assert one is not None
    assert (one.key, one.known, one.num_events) == ("a:b", (Known(1, False),), 0)


@pytest.mark.parametrize(
    "given", ["", "x", "x:", ":1", "x:f", "x:1,", "x:1f2", "x:-1", "x:1@", "x y:1", "x:12345678901", "x" * 513 + ":1"]
)
def test_other_ids_are_refused(given: str) -> None:
    assert field_of(place_of, {"last-event-id": given}) == "Last-Event-ID"


def test_an_id_is_at_most_16_kib_long() -> None:
    given = "x:" + ",".join(["1"] * 8191)
    assert len(given) == 16 * 1024 - 1
    assert place_of({"last-event-id": given}) is not None
    assert field_of(place_of, {"last-event-id": given + ",1"}) == "Last-Event-ID"


def test_the_last_of_several_events_has_the_id() -> None:
    line = b"id: a:1\n"
    assert with_id(b"data: 1\n\n", line) == b"id: a:1\ndata: 1\n\n"
    assert with_id(b"data: 1\n\ndata: 2\n\n", line) == b"data: 1\n\nid: a:1\ndata: 2\n\n"
