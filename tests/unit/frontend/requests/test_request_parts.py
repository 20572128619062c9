"""What becomes of a body before and after the engine, part by part: choices, parameters, constraints, embeddings."""

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pagoda_common.errors import Code, InvalidRequest, PagodaError, RequestTooLong
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.openai.protocol import ChatBody
from pagoda_frontend.requests.choices import Choices, check_searchable, choices_of
from pagoda_frontend.requests.embeddings import check_task, embedding_of
from pagoda_frontend.requests.params import (
    SamplingDefaults,
    check_cache_salt,
    check_output_logprobs,
    check_prompt_logprobs,
    check_sampling_params,
    check_supported,
    check_token_ids,
    fit_to_context,
    make_sampling_params,
    sampling_defaults,
    too_long,
)
from pagoda_frontend.requests.run import CollectedSequence
from pagoda_frontend.requests.sampling import sampling_params_of
from pagoda_frontend.requests.structured import structured_outputs_of


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [], **fields})


def sequence(index: int, *logprobs: float) -> CollectedSequence:
    positions = [TokenLogprobs([1, 2], [value, 9.0], 1) for value in logprobs]
    return cast("CollectedSequence", SimpleNamespace(index=index, logprobs=positions, embedding=None))


def test_the_best_of_each_prompt_are_returned_in_order_and_numbered_anew() -> None:
    sequences = [
        *(sequence(0, -3.0), sequence(1, -1.0, -1.0), sequence(2, -2.0, 0.0, -1.0)),
        *(sequence(3, -1.0), sequence(4), sequence(5, -0.5, -4.0)),
    ]
    chosen = Choices(n=2, num_generated=3).best(sequences)
    assert chosen == [sequences[1], sequences[2], sequences[3], sequences[5]]
    assert [one.index for one in chosen] == [0, 1, 2, 3]
    same = Choices(n=3, num_generated=3)
    assert (same.is_chosen, Choices(n=2, num_generated=3).is_chosen) == (False, True)
    assert same.best(sequences) == sequences


@pytest.mark.parametrize(
    ("fields", "best_of", "expected"),
    [
        ({}, None, Choices(n=1, num_generated=1)),
        ({"n": 3}, None, Choices(n=3, num_generated=3)),
        ({"n": 2}, 5, Choices(n=2, num_generated=5)),
        ({"n": 2}, 20, Choices(n=2, num_generated=20)),
        ({"n": 2, "stream": True}, 2, Choices(n=2, num_generated=2)),
        (
            {"n": 2, "use_beam_search": True},
            None,
            Choices(n=2, num_generated=2, beam_search=BeamSearchParams(beam_width=2)),
        ),
        (
            {"n": 2, "use_beam_search": True, "length_penalty": 0.0, "early_stopping": True, "stream": True},
            4,
            Choices(
                n=2,
                num_generated=2,
                beam_search=BeamSearchParams(beam_width=4, length_penalty=0.0, early_stopping="first"),
            ),
        ),
        (
            {"use_beam_search": True, "early_stopping": "never"},
            None,
            Choices(n=1, num_generated=1, beam_search=BeamSearchParams(beam_width=1, early_stopping="never")),
        ),
        (
            {"use_beam_search": True, "early_stopping": False},
            None,
            Choices(n=1, num_generated=1, beam_search=BeamSearchParams(beam_width=1)),
        ),
    ],
)
def test_what_is_generated_and_returned(fields: dict[str, Any], best_of: int | None, expected: Choices) -> None:
    assert choices_of(chat(**fields), best_of=best_of, with_logprobs=False) == expected
    given = BeamSearchParams(beam_width=7)
    made = choices_of(chat(n=2), best_of=None, with_logprobs=False, beam_search=given)
    assert made == Choices(n=2, num_generated=2, beam_search=given)


@pytest.mark.parametrize(
    ("fields", "best_of", "with_logprobs", "field", "message"),
    [
        ({"n": 0}, None, False, "n", "n must be at least 1, got 0"),
        ({"n": 3}, 2, False, "best_of", r"best_of must be at least n \(3\), got 2"),
        ({}, 21, False, "best_of", "best_of must be at most 20, got 21"),
        ({"stream": True, "n": 2}, 3, False, "best_of", r"best_of must be n \(2\) in a stream, got 3"),
        ({"use_beam_search": True}, None, True, "logprobs", "logprobs are not supported with beam search"),
        (
            {"use_beam_search": True, "presence_penalty": 0.5},
            None,
            False,
            "presence_penalty",
            "not supported with beam",
        ),
        (
            {"use_beam_search": True, "min_tokens": 2},
            None,
            False,
            "min_tokens",
            "min_tokens is not supported",
        ),
        ({"use_beam_search": True, "temperature": 0.5}, None, False, "", ""),
    ],
)
def test_what_does_not_go_together(
    fields: dict[str, Any], best_of: int | None, with_logprobs: bool, field: str, message: str
) -> None:
    def made() -> Choices:
        return choices_of(chat(**fields), best_of=best_of, with_logprobs=with_logprobs)

    if not field:
        assert made().beam_search is not None
        check_searchable(SamplingParams(temperature=0.5, top_k=3), with_logprobs=False)
        return
    with pytest.raises(InvalidRequest, match=message) as caught:
        made()
    assert caught.value.field == field


NONE = SamplingDefaults()
SOME = SamplingDefaults(max_new_tokens=50, temperature=0.6, top_k=20, repetition_penalty=1.1)


def params(defaults: SamplingDefaults = NONE, **fields: Any) -> SamplingParams:
    more = {name: fields.pop(name) for name in ("n", "is_search", "prompt_logprobs") if name in fields}
    given = {"logprobs": fields.pop("logprobs", None), "max_tokens": fields.pop("limit", None)}
    return make_sampling_params(chat(**fields), defaults=defaults, **given, **more)


def test_a_request_goes_before_the_model_and_the_model_before_the_default() -> None:
    assert params() == SamplingParams(max_tokens=None)
    assert params(SOME) == SamplingParams(max_tokens=50, temperature=0.6, top_k=20, repetition_penalty=1.1)
    asked = params(SOME, temperature=0.0, top_k=5)
    assert asked == SamplingParams(max_tokens=50, temperature=0.0, top_k=5, repetition_penalty=1.1)
    assert [params(SOME, limit=limit).max_tokens for limit in (49, 50, 51)] == [49, 50, 50]
    assert params(limit=51).max_tokens == 51
    search = params(SOME, is_search=True, temperature=0.5, top_k=5, repetition_penalty=1.2, n=3)
    assert search == SamplingParams(max_tokens=50, repetition_penalty=1.2, n=3)


def test_what_bodies_write_in_another_way() -> None:
    made = params(logit_bias={"5": 1.5, "7": -2.0}, vllm_xargs={"a": 1}, logprobs=3, prompt_logprobs=2)
    assert (made.logit_bias, made.extra_args) == ({5: 1.5, 7: -2.0}, {"a": 1})
    assert (made.logprobs, made.prompt_logprobs) == (3, 2)
    assert params(logprob_token_ids=[4], logprobs=0).logprob_token_ids == (4,)
    for fields, field, message in (
        ({"logit_bias": {"x": 1.0}}, "logit_bias", "logit_bias keys must be token ids, got 'x'"),
        ({"logprob_token_ids": [4]}, "logprob_token_ids", "logprob_token_ids needs logprobs"),
        ({"vllm_xargs": {"a": 2**70}}, "vllm_xargs", "vllm_xargs: integers must fit 64 bits"),
        ({"temperature": 3.0}, "temperature", r"temperature must be in \[0, 2\], got 3"),
    ):
        with pytest.raises(InvalidRequest, match=message) as caught:
            params(**cast("Any", fields))
        assert caught.value.field == field


def test_a_generation_config_gives_numbers_alone() -> None:
    given = {"temperature": 0.5, "top_k": 7.5, "top_p": True, "min_p": "x", "max_new_tokens": 9, "eos_token_id": 3}
    made = sampling_defaults(json.dumps(given))
    assert (made.values, made.max_new_tokens) == ({"temperature": 0.5}, 9)
    assert (sampling_defaults("").values, sampling_defaults("").max_new_tokens) == ({}, None)
    whole = sampling_defaults('{"top_k": 7, "temperature": 1, "repetition_penalty": 1.5}')
    assert whole.values == {"top_k": 7, "temperature": 1, "repetition_penalty": 1.5}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1}, ""),
        ({"best_of": None}, ""),
        ({"suffix": "x"}, "suffix"),
        ({"suffix": ""}, ""),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"logits_processors": []}, ""),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text"]}, ""),
        ({"modalities": ["audio"]}, "modalities"),
        ({"repetition_detection": {}}, "repetition_detection"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {}, "stream": True}, ""),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, ""),
        ({"cache_salt": "a/b"}, "cache_salt"),
    ],
)
def test_what_is_not_there_is_refused_where_it_asks_for_something(fields: dict[str, Any], field: str) -> None:
    if not field:
        check_supported(chat(**fields))
        return
    with pytest.raises(InvalidRequest) as caught:
        check_supported(chat(**fields))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        (None, ""),
        ("a", ""),
        ("s" * 128, ""),
        ("s" * 129, "must have at most 128 characters, got 129"),
        ("", "must not be empty, got ''"),
        ("a@b", "got '@'"),
        ("a/b", "got '/'"),
        ("a\\b", r"got '\\\\'"),
        ("a\0b", r"got '\\x00'"),
    ],
)
def test_a_salt_has_no_sign_of_a_store(salt: str | None, message: str) -> None:
    if not message:
        check_cache_salt(salt)
        return
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_cache_salt(salt)
    assert caught.value.field == "cache_salt"


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"stop_token_ids": [9, 10]}, "stop_token_ids", "token id 10 is out of vocabulary, must be below 10"),
        ({"allowed_token_ids": [10]}, "allowed_token_ids", "token id 10"),
        ({"logit_bias": {10: 1.0}}, "logit_bias", "token id 10"),
        ({"logprob_token_ids": [10], "logprobs": 0}, "logprob_token_ids", "token id 10"),
        ({"bad_words_token_ids": ((1,), (2, 10))}, "bad_words_token_ids", "token id 10"),
        ({"logprobs": 6}, "logprobs", "logprobs must be at most 5, got 6"),
        ({"logprobs": -1}, "logprobs", "logprobs must be at most 5, got -1"),
        ({"prompt_logprobs": 6}, "prompt_logprobs", "prompt_logprobs must be at most 5, got 6"),
    ],
)
def test_parameters_fit_the_vocabulary_and_the_bound(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_sampling_params(SamplingParams(**fields), vocab_size=10, max_logprobs=5)
    assert caught.value.field == field
    good = {"stop_token_ids": [0, 9], "allowed_token_ids": [9], "logit_bias": {9: 1.0}, "logprobs": 5}
    more = {"prompt_logprobs": 5, "bad_words_token_ids": ((9,),)}
    check_sampling_params(SamplingParams(**good, **more), vocab_size=10, max_logprobs=5)
    check_token_ids((), vocab_size=0, field="x")
    with pytest.raises(InvalidRequest, match="x: token id -1 is out of vocabulary, must be at least 0"):
        check_token_ids((3, -1), vocab_size=10, field="x")


def test_an_answer_holds_so_many_log_probabilities_of_prompts() -> None:
    most = 1024**2
    for number, num_tokens in ((0, most), (1, most // 2), (3, most // 4)):
        asked = SamplingParams(prompt_logprobs=number)
        check_prompt_logprobs(asked, num_prompt_tokens=num_tokens, vocab_size=10)
        with pytest.raises(InvalidRequest, match=f"there may be at most {most} entries, got") as caught:
            check_prompt_logprobs(asked, num_prompt_tokens=num_tokens + 1, vocab_size=10)
        assert caught.value.field == "prompt_logprobs"
    whole = SamplingParams(prompt_logprobs=-1)
    check_prompt_logprobs(whole, num_prompt_tokens=most // 4, vocab_size=3)
    with pytest.raises(InvalidRequest, match="with 4 entries each"):
        check_prompt_logprobs(whole, num_prompt_tokens=most // 4 + 1, vocab_size=3)
    check_prompt_logprobs(SamplingParams(), num_prompt_tokens=10**9, vocab_size=10)


def test_a_call_of_several_sequences_holds_so_many_log_probabilities() -> None:
    most = 4 * 1024**2
    for n, logprobs, max_tokens in ((2, 0, most // 2), (4, 3, most // 16), (2, -1, most // 8)):
        asked = SamplingParams(n=n, logprobs=logprobs, max_tokens=max_tokens)
        check_output_logprobs([asked], vocab_size=3)
        too_many = SamplingParams(n=n, logprobs=logprobs, max_tokens=max_tokens + 1)
        with pytest.raises(InvalidRequest, match=f"there may be at most {most} entries, got .*; lower max") as caught:
            check_output_logprobs([too_many], vocab_size=3)
        assert caught.value.field == "logprobs"
    several = [SamplingParams(logprobs=1, max_tokens=most // 4)] * 2
    check_output_logprobs(several, vocab_size=10)
    with pytest.raises(
        InvalidRequest, match=f"logprobs of 3 sequences with {3 * most // 4} tokens in all and 2 entries"
    ):
        check_output_logprobs([*several, several[0]], vocab_size=10)
    check_output_logprobs([SamplingParams(logprobs=20, max_tokens=10**7)], vocab_size=10)
    check_output_logprobs([SamplingParams(n=100, max_tokens=10**7)], vocab_size=10)


def test_an_output_fits_what_the_prompt_leaves() -> None:
    def fitted(num_prompt_tokens: int, **fields: Any) -> SamplingParams:
        asked = SamplingParams(**fields)
        return fit_to_context(asked, num_prompt_tokens=num_prompt_tokens, max_model_len=10, field="prompt")

    assert [fitted(7, max_tokens=number).max_tokens for number in (None, 2, 3, 4)] == [3, 2, 3, 3]
    assert fitted(9, max_tokens=None).max_tokens == 1
    assert fitted(7, max_tokens=5, min_tokens=3).max_tokens == 3
    with pytest.raises(InvalidRequest, match=r"min_tokens must be at most max_tokens \(3\), got 4") as caught:
        fitted(7, max_tokens=5, min_tokens=4)
    assert caught.value.field == "min_tokens"
    with pytest.raises(RequestTooLong) as too_many:
        fitted(10, max_tokens=1)
    assert (too_many.value.field, too_many.value.message) == ("prompt", too_long("10", 10))
    assert too_long("10", 9) == (
        "This model's maximum context length is 9 tokens, but the prompt has 10 tokens and at least one must be left "
        "for the output."
    )
    with pytest.raises(InvalidRequest, match="prompt is empty: the decoder prompt cannot be empty"):
        fitted(0)


class Model:
    """As much of a model as parameters need."""

    vocab_size = 100
    max_model_len = 50
    defaults = NONE
    tokenizer: Any = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(text[0]) % 90, len(text)])
    structured_outputs: Any = SimpleNamespace(applied_to=lambda constraint: constraint)


def test_parameters_of_a_body_with_a_choice_among_more() -> None:
    def made(choices: Choices, *, logprobs: int | None = None, **fields: Any) -> SamplingParams:
        body = chat(**fields)
        return sampling_params_of(
            body, model=cast("Any", Model()), max_logprobs=5, choices=choices, logprobs=logprobs, max_tokens=7
        )

    plain = made(Choices(n=1, num_generated=1), bad_words=["ab"], structured_outputs={"regex": "a"})
    assert (plain.n, plain.logprobs, plain.max_tokens) == (1, None, 7)
    assert plain.structured_outputs == StructuredOutputsParams(regex="a")
    assert plain.bad_words_token_ids
    chosen = made(Choices(n=1, num_generated=3), prompt_logprobs=2)
    assert (chosen.n, chosen.logprobs, chosen.prompt_logprobs) == (3, 0, 2), "the choice is made by them"
    assert made(Choices(n=1, num_generated=3), logprobs=4).logprobs == 4
    with pytest.raises(InvalidRequest, match="best_of: n must be 1 when temperature is 0") as caught:
        made(Choices(n=1, num_generated=3), temperature=0)
    assert caught.value.field == "best_of"
    with pytest.raises(InvalidRequest, match="n must be 1 when temperature is 0") as caught:
        made(Choices(n=3, num_generated=3), temperature=0)
    assert caught.value.field == "n"
    with pytest.raises(InvalidRequest, match="token id 100"):
        made(Choices(n=1, num_generated=1), stop_token_ids=[100])
    with pytest.raises(InvalidRequest, match="must be at most 5, got 6"):
        made(Choices(n=1, num_generated=1), logprobs=6)


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"response_format": JSON_SCHEMA}, StructuredOutputsParams(json={"type": "integer"})),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": False}}},
            StructuredOutputsParams(json={}),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": {"type": "any_text"}}),
        ),
        (
            {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True, "whitespace_pattern": " "}},
            StructuredOutputsParams(choice=["a"], disable_any_whitespace=True, whitespace_pattern=" "),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_additional_properties": True, "regex": None}},
            StructuredOutputsParams(json_object=True, disable_additional_properties=True),
        ),
        (
            {"structured_outputs": {"grammar": "start: x"}, "response_format": {"type": "text"}},
            StructuredOutputsParams(grammar="start: x"),
        ),
    ],
)
def test_a_body_asks_for_this_constraint(fields: dict[str, Any], expected: StructuredOutputsParams | None) -> None:
    assert structured_outputs_of(chat(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"guided_json": {}}, "guided_json", "guided_json is not supported: use structured_outputs.json$"),
        ({"guided_regex": "a"}, "guided_regex", "use structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "guided_choice", "use structured_outputs.choice"),
        ({"guided_grammar": "a"}, "guided_grammar", "use structured_outputs.grammar"),
        ({"guided_json_object": True}, "guided_json_object", "use structured_outputs.json_object"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern", "use structured_outputs.whitespace_pattern"),
        (
            {"response_format": JSON_SCHEMA, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "cannot both constrain the output",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "must be one of text, json_object, json_schema, str"),
        ({"response_format": {}}, "response_format", "got None"),
        (
            {"response_format": {"type": "json_schema", "json_schema": []}},
            "response_format",
            r"response_format.json_schema must be an object with name and schema, got \[\]",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": ""}}},
            "response_format",
            "json_schema.name must be a string that is not empty, got ''",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": 1}}},
            "response_format",
            "json_schema.strict must be true or false, got 1",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": []}}},
            "response_format",
            r"json_schema.schema must be an object, got \[\]",
        ),
        ({"response_format": {"type": "structural_tag", "x": 5}}, "", ""),
    ],
)
def test_a_constraint_that_is_none_is_named(fields: dict[str, Any], field: str, message: str) -> None:
    if not field:
        assert structured_outputs_of(chat(**fields)) is not None
        return
    with pytest.raises(InvalidRequest, match=message) as caught:
        structured_outputs_of(chat(**fields))
    assert caught.value.field == field


def pooling_model(**fields: Any) -> Any:
    given = {"pooling_tasks": ("embed", "score"), "embedding_size": 8, "has_matryoshka": True}
    return SimpleNamespace(**given | {"matryoshka_dimensions": (), "unserved_pooling_tasks": ()} | fields)


@pytest.mark.parametrize(
    ("fields", "task", "dimensions", "message"),
    [
        ({}, "embed", None, ""),
        ({}, "embed", 8, ""),
        ({}, "embed", 1, ""),
        ({}, "embed", 0, "dimensions must be between 1 and 8, got 0"),
        ({}, "embed", 9, "dimensions must be between 1 and 8, got 9"),
        ({"matryoshka_dimensions": (2, 4)}, "embed", 4, ""),
        ({"matryoshka_dimensions": (2, 4)}, "embed", 3, "dimensions must be one of 2, 4, got 3"),
        ({"has_matryoshka": False}, "embed", 8, ""),
        (
            {"has_matryoshka": False},
            "embed",
            4,
            "must be 8, the model's embeddings cannot be shortened, got 4",
        ),
        ({"embedding_size": 0, "has_matryoshka": False}, "score", 4, ""),
        ({"pooling_tasks": ()}, "classify", None, ""),
    ],
)
def test_embeddings_are_as_long_as_the_model_allows(
    fields: dict[str, Any], task: Any, dimensions: int | None, message: str
) -> None:
    if not message:
        check_task(pooling_model(**fields), task, dimensions=dimensions)
        return
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_task(pooling_model(**fields), task, dimensions=dimensions)
    assert caught.value.field == "dimensions"


def test_a_task_that_the_model_does_not_do_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="it can embed, score") as caught:
        check_task(pooling_model(), "classify")
    assert caught.value.field == "task"
    one = sequence(0)
    with pytest.raises(PagodaError, match="the request was aborted") as gone:
        embedding_of(one)
    assert gone.value.code is Code.CANCELLED
    one.embedding = np.ones(2, np.float32)
    assert embedding_of(one) is one.embedding


def test_a_mean_of_no_log_probability_is_the_worst() -> None:
    chosen = Choices(n=1, num_generated=2).best([sequence(0), sequence(1, -1e9)])
    assert [one.logprobs != [] for one in chosen] == [True]
