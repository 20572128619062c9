"""LLM.beam_search against a fake scheduler: what is submitted, and vLLM's shape of the hypotheses."""

import pytest

from pagoda import LLM, BeamSearchParams
from pagoda.v1 import types_pb2
from pagoda_common.errors import InvalidRequest
from pagoda_common.text.tokenizer import Tokenizer
from tests.fakes.fake_scheduler import SAMPLED_LOGPROB
from tests.service.client.conftest import FakeSchedulerThread


def test_hypotheses_have_prompt_and_output_best_first(llm: LLM, scheduler_thread: FakeSchedulerThread) -> None:
    fake = scheduler_thread.fake
    fake.submits.clear()
    params = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=0.5, early_stopping="first")
    [first, second] = llm.beam_search([[5, 6], [9]], params)
    assert [sequence.tokens for sequence in first.sequences] == [
        [5, 6, *fake.tokens([5, 6], 3, index)] for index in range(2)
    ]
    assert second.sequences[0].tokens == [9, *fake.tokens([9], 3)]
    tokenizer = Tokenizer.load("pagoda-tiny")
    best = first.sequences[0]
    assert best.text == tokenizer.decode(best.tokens, skip_special_tokens=False)
    assert (best.finish_reason, best.stop_reason) == ("length", None)
    assert best.cum_logprob == 3 * SAMPLED_LOGPROB
    assert [next(iter(row)) for row in best.logprobs] == best.tokens[2:]
    submitted = fake.submits[0].beam_search
    assert (submitted.beam_width, submitted.length_penalty) == (2, 0.5)
    assert submitted.early_stopping == types_pb2.EARLY_STOPPING_FIRST


@pytest.mark.parametrize("words", [[7, 8], [*range(7, 30)]], ids=["short", "long"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_end_token_is_the_reason_and_not_part_of_the_hypothesis(
    llm: LLM, scheduler_thread: FakeSchedulerThread, is_kept: bool, words: list[int]
) -> None:
    scheduler_thread.fake.script = [*words, 2]
    try:
        params = BeamSearchParams(beam_width=1, max_tokens=40, include_stop_str_in_output=is_kept)
        [output] = llm.beam_search([[5]], params)
    finally:
        scheduler_thread.fake.script = None
    [sequence] = output.sequences
    expected = [5, *words, 2] if is_kept else [5, *words]
    assert (sequence.tokens, sequence.finish_reason, sequence.stop_reason) == (expected, "stop", 2)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
    ],
)
def test_bad_parameters_are_named(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})  # type: ignore[arg-type]
    assert caught.value.field == field
