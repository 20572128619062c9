"""What users pass as prompts: salts, bounds of token ids and of the context, truncation."""

from typing import Any

import pytest

from pagoda.llm.prompts import as_prompt_list, check_params, read_prompts
from pagoda.v1 import types_pb2
from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.text.tokenizer import Tokenizer

INFO = types_pb2.ModelInfo(vocab_size=3072, max_model_len=10)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


def read(tokenizer: Tokenizer, *prompts: Any, **options: Any) -> list[Any]:
    return read_prompts(list(prompts), tokenizer=tokenizer, model_info=INFO, **options)


def test_each_prompt_keeps_its_own_salt_text_and_place(tokenizer: Tokenizer) -> None:
    first, second, third, fourth = read(
        tokenizer,
        {"prompt": "a dog", "cache_salt": "mine"},
        [5, 6],
        {"prompt_token_ids": [7], "prompt": "seven", "cache_salt": "yours"},
        "a cat",
    )
    assert [one.cache_salt for one in (first, second, third, fourth)] == ["mine", "", "yours", ""]
    assert [one.text for one in (first, second, third, fourth)] == ["a dog", None, "seven", "a cat"]
    assert first.token_ids == tokenizer.encode("a dog")
    assert (second.token_ids, third.token_ids) == ([5, 6], [7])
    assert fourth.token_ids == tokenizer.encode("a cat")


def test_one_prompt_is_a_list_of_one() -> None:
    assert as_prompt_list("a") == ["a"]
    assert as_prompt_list([1, 2]) == [[1, 2]]
    assert as_prompt_list({"prompt": "a"}) == [{"prompt": "a"}]
    assert as_prompt_list([[1], [2]]) == [[1], [2]]
    assert as_prompt_list(["a", "b"]) == ["a", "b"]
    assert as_prompt_list([]) == []
    with pytest.raises(InvalidRequest):
        as_prompt_list(5)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_prompt_that_leaves_room_for_one_token_is_taken(tokenizer: Tokenizer, num_tokens: int) -> None:
    assert len(read(tokenizer, [3071] * num_tokens)[0].token_ids) == num_tokens
    assert len(read(tokenizer, [0] * 10, num_output_tokens=0)[0].token_ids) == 10


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([5] * 10, RequestTooLong, "and at least one must be left for the output"),
        ([5] * 11, RequestTooLong, "maximum context length is 10 tokens, but the prompt has 11 tokens"),
        ([3072], InvalidRequest, "0 to 3071"),
        ([-1], InvalidRequest, "0 to 3071"),
        ([True], InvalidRequest, "token True"),
        ([1.0], InvalidRequest, r"token 1\.0"),
        ([], InvalidRequest, "the decoder prompt cannot be empty"),
        ("", InvalidRequest, "the decoder prompt cannot be empty"),
        (5, InvalidRequest, "a text or a list"),
        ({"prompt": None}, InvalidRequest, "a text or a list"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, InvalidRequest, "models take text only"),
    ],
)
def test_other_prompts_are_refused_by_their_place(
    tokenizer: Tokenizer, prompt: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read(tokenizer, [1], prompt)
    assert caught.value.field == "prompts[1]"  # type: ignore[attr-defined]  # all are PagodaErrors


def test_each_prompt_is_cut_by_its_own_parameters(tokenizer: Tokenizer) -> None:
    params = [
        SamplingParams(truncate_prompt_tokens=2, max_tokens=8),
        SamplingParams(truncate_prompt_tokens=-1, max_tokens=6),
    ]
    cut = read(tokenizer, [1, 2, 3], [1, 2, 3, 4, 5, 6], params=params)
    assert [one.token_ids for one in cut] == [[2, 3], [3, 4, 5, 6]]
    same = read(tokenizer, [1, 2, 3], [4, 5, 6], params=params[0])
    assert [one.token_ids for one in same] == [[2, 3], [5, 6]]
    assert [one.token_ids for one in read(tokenizer, [1, 2, 3], params=SamplingParams())] == [[1, 2, 3]]


def test_log_probabilities_are_bounded_where_a_bound_is_known() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        for value, bound in ((20, 20), (-1, -1), (-1, 3072), (21, None), (99, -1), (0, 0)):
            check_params(SamplingParams(**{name: value}), model_info=INFO, max_logprobs=bound)
        for value, bound in ((21, 20), (-1, 20), (-1, 3071), (1, 0)):
            with pytest.raises(InvalidRequest, match="max_logprobs") as caught:
                check_params(SamplingParams(**{name: value}), model_info=INFO, max_logprobs=bound)
            assert caught.value.field == name


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias", "logprob_token_ids", "stop_token_ids"])
def test_token_ids_of_parameters_are_of_the_vocabulary(name: str) -> None:
    for token_id, is_known in ((3071, True), (3072, False)):
        value: Any = {token_id: 1.0, 0: 1.0} if name == "logit_bias" else [token_id, 0]
        params = SamplingParams(**{name: value})
        if is_known:
            check_params(params, model_info=INFO, max_logprobs=None)
            continue
        with pytest.raises(InvalidRequest, match="the vocabulary has 3072") as caught:
            check_params(params, model_info=INFO, max_logprobs=None)
        assert caught.value.field == name
