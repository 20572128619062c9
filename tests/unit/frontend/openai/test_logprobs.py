"""Log probabilities in OpenAI's shapes: places, bounds, what JSON cannot write."""

import math

import pytest

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.openai.logprobs import LEAST_LOGPROB, LogprobWriter, prompt_logprobs_by_id

TOKENIZER = Tokenizer.load(EMBEDDED_MODEL)
FIRST = TokenLogprobs(token_ids=[300, 301, 302], logprobs=[-3.0, -0.5, -1.0], sampled_rank=7)
SECOND = TokenLogprobs(token_ids=[303, 303, 304], logprobs=[-0.25, -0.25, -math.inf], sampled_rank=1)


def writer(num_top: int, *, as_token_ids: bool = True) -> LogprobWriter:
    return LogprobWriter(tokenizer=TOKENIZER, num_top=num_top, as_token_ids=as_token_ids)


def name(token_id: int) -> str:
    return f"token_id:{token_id}"


def test_a_completion_has_parallel_lists_with_the_sampled_token_among_the_likeliest() -> None:
    lists = writer(1).for_completion([FIRST, SECOND], [10, 14])
    assert lists == {
        "text_offset": [10, 14],
        "token_logprobs": [-3.0, -0.25],
        "tokens": [name(300), name(303)],
        "top_logprobs": [{name(300): -3.0, name(301): -0.5}, {name(303): -0.25}],
    }
    assert writer(0).for_completion([FIRST], [0])["top_logprobs"] == [{name(300): -3.0}]
    everything = writer(-1).for_completion([FIRST, SECOND], [0, 1])["top_logprobs"]
    assert everything == [
        {name(300): -3.0, name(301): -0.5, name(302): -1.0},
        {name(303): -0.25, name(304): LEAST_LOGPROB},
    ]


def test_a_conversation_has_an_object_a_token_with_the_likeliest_in_order() -> None:
    (one, two) = writer(2).for_chat([FIRST, SECOND])["content"]
    assert (one["token"], one["logprob"]) == (name(300), -3.0)
    assert [(top["token"], top["logprob"]) for top in one["top_logprobs"]] == [(name(301), -0.5), (name(302), -1.0)]
    assert [(top["token"], top["logprob"]) for top in two["top_logprobs"]] == [(name(303), -0.25), (name(304), -9999.0)]
    assert writer(0).for_chat([FIRST])["content"][0]["top_logprobs"] == []
    assert writer(0).for_chat([])["refusal"] is None


def test_tokens_are_their_text_and_bytes_unless_ids_are_asked_for() -> None:
    token_id = TOKENIZER.encode("dog", add_special_tokens=False)[0]
    entry = TokenLogprobs(token_ids=[token_id], logprobs=[-1.0], sampled_rank=1)
    (shown,) = writer(0, as_token_ids=False).for_chat([entry])["content"]
    assert shown["token"] == TOKENIZER.token_text(token_id)
    assert bytes(shown["bytes"]) == TOKENIZER.token_bytes(token_id)


@pytest.mark.parametrize("value", [-math.inf, math.nan, -10_000.0])
def test_what_json_cannot_write_is_the_least(value: float) -> None:
    entry = TokenLogprobs(token_ids=[300], logprobs=[value], sampled_rank=1)
    assert writer(0).for_completion([entry], [0])["token_logprobs"] == [-9999.0]


def test_a_prompt_has_null_where_there_is_no_distribution() -> None:
    lists = writer(0).for_prompt([9, 300, 303], [None, FIRST, SECOND], [0, 1, 2])
    assert lists["tokens"] == [name(9), name(300), name(303)]
    assert lists["token_logprobs"] == [None, -3.0, -0.25]
    assert lists["top_logprobs"] == [None, {name(300): -3.0}, {name(303): -0.25}]
    assert lists["text_offset"] == [0, 1, 2]


def test_prompt_log_probabilities_by_id_have_ranks_and_the_sampled_token_its_own() -> None:
    assert prompt_logprobs_by_id(None, TOKENIZER) is None
    shown = prompt_logprobs_by_id([None, FIRST, SECOND], TOKENIZER)
    assert shown is not None
    assert shown[0] is None
    first, second = shown[1], shown[2]
    assert first is not None
    assert second is not None
    assert {key: entry["rank"] for key, entry in first.items()} == {"300": 7, "301": 1, "302": 2}
    assert {key: entry["rank"] for key, entry in second.items()} == {"303": 1, "304": 2}
    assert first["301"] == {"logprob": -0.5, "rank": 1, "decoded_token": TOKENIZER.token_text(301)}
    assert second["304"]["logprob"] == LEAST_LOGPROB
