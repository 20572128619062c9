"""docs/matrix.md: the fields that do not go together are those that the code refuses or sets apart."""

import re
from pathlib import Path

import pytest

from pagoda_common.config.speculative_config import takes_drafts
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.requests.choices import NOT_WITH_BEAM_SEARCH

PAGE = (Path(__file__).parents[3] / "docs" / "matrix.md").read_text(encoding="utf-8")
OTHER_NAMES = {"bad_words_token_ids": "bad_words", "extra_args": "vllm_xargs"}
"""Fields that are the same as another one, for the worker or for a library."""
WITHOUT_DRAFTS = {
    "presence_penalty": SamplingParams(presence_penalty=1.0),
    "frequency_penalty": SamplingParams(frequency_penalty=1.0),
    "repetition_penalty": SamplingParams(repetition_penalty=1.5),
    "min_tokens": SamplingParams(min_tokens=2),
    "logit_bias": SamplingParams(logit_bias={3: 1.0}),
    "allowed_token_ids": SamplingParams(allowed_token_ids=[3]),
    "bad_words": SamplingParams(bad_words_token_ids=([3],)),
    "structured_outputs": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")),
    "vllm_xargs": SamplingParams(extra_args={"name": 1}),
}
WITH_DRAFTS = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(seed=1, n=2, logprobs=3, top_k=5)]


def fields_of(what: str) -> set[str]:
    """The fields in the rows of the page that begin with `what`."""
    rows = re.findall(rf"^\| {re.escape(what)} \| (.*) \|$", PAGE, re.MULTILINE)
    return {field for row in rows for field in re.findall(r"`(\w+)`", row)}


def test_a_beam_search_refuses_what_the_page_says() -> None:
    refused = {OTHER_NAMES.get(name, name) for name, _ in NOT_WITH_BEAM_SEARCH} | {"logprobs"}
    assert fields_of("beam search refuses") == refused


def test_a_beam_search_ignores_what_the_page_says() -> None:
    assert fields_of("beam search ignores") == {row.name for row in SAMPLING_FIELDS.values() if row.search == "ignored"}


def test_the_page_names_the_fields_of_sequences_without_drafts() -> None:
    assert fields_of("no drafts") == set(WITHOUT_DRAFTS)


@pytest.mark.parametrize("field", WITHOUT_DRAFTS)
def test_a_field_stops_drafts(field: str) -> None:
    assert not takes_drafts(WITHOUT_DRAFTS[field])


@pytest.mark.parametrize("params", WITH_DRAFTS)
def test_other_fields_do_not(params: SamplingParams) -> None:
    assert takes_drafts(params)
