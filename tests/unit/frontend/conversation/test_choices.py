"""How many sequences are generated and which are returned; what does not go with a beam search."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.outputs import SequenceDelta, TokenLogprobs
from pagoda_frontend.conversation.conversation import _asked
from pagoda_frontend.openai.protocol import ChatBody, CompletionBody
from pagoda_frontend.requests.choices import Choices, choices_of
from pagoda_frontend.requests.params import SamplingDefaults
from pagoda_frontend.requests.run import CollectedSequence


def choices(best_of: int | None = None, *, with_logprobs: bool = False, **fields: Any) -> Choices:
    body = CompletionBody.model_validate({"prompt": "x", **fields})
    return choices_of(body, best_of=best_of, with_logprobs=with_logprobs)


def sequence(index: int, *logprobs: float) -> CollectedSequence:
    made = CollectedSequence(index)
    entries = [TokenLogprobs(token_ids=[1], logprobs=[value], sampled_rank=1) for value in logprobs]
    made.add(SequenceDelta(index=index, text=str(index), token_ids=[1] * len(entries), offset=0, logprobs=entries))
    return made


def test_the_best_of_each_prompt_are_returned_in_order_and_numbered_anew() -> None:
    asked = Choices(n=2, num_generated=3)
    given = [
        *(sequence(0, -3.0), sequence(1, -1.0, -1.0, -1.0, -1.0), sequence(2, -2.0)),
        *(sequence(3, -1.0), sequence(4), sequence(5, -0.5, -4.5)),
    ]
    best = asked.best(given)
    assert [one.text for one in best] == ["1", "2", "3", "5"], "by the mean, not the sum"
    assert [one.index for one in best] == [0, 1, 2, 3]


def test_all_are_returned_as_they_came_when_no_more_were_generated() -> None:
    given = [sequence(0, -3.0), sequence(1, -1.0)]
    assert [one.text for one in Choices(n=2, num_generated=2).best(given)] == ["0", "1"]


def test_n_and_best_of_take_their_bounds() -> None:
    assert choices() == Choices(n=1, num_generated=1)
    assert choices(n=3) == Choices(n=3, num_generated=3)
    assert choices(3, n=3) == Choices(n=3, num_generated=3)
    assert choices(20, n=3) == Choices(n=3, num_generated=20)
    assert choices(3, n=3, stream=True).num_generated == 3
    for best_of, fields, field in (
        (None, {"n": 0}, "n"),
        (2, {"n": 3}, "best_of"),
        (21, {"n": 3}, "best_of"),
        (4, {"n": 3, "stream": True}, "best_of"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            choices(best_of, **fields)
        assert caught.value.field == field


def test_a_search_is_as_wide_as_best_of_or_n() -> None:
    found = choices(use_beam_search=True, n=2)
    assert found == Choices(n=2, num_generated=2, beam_search=BeamSearchParams(beam_width=2))
    found = choices(5, use_beam_search=True, n=2, length_penalty=0.0, early_stopping=True)
    assert found.num_generated == 2
    assert found.beam_search == BeamSearchParams(beam_width=5, length_penalty=0.0, early_stopping="first")
    assert choices(use_beam_search=True, early_stopping="never").beam_search == BeamSearchParams(
        beam_width=1, early_stopping="never"
    )
    assert not found.is_chosen


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
    ],
)
def test_what_shapes_sampling_does_not_go_with_a_search(fields: dict[str, Any], field: str) -> None:
    choices(**fields)
    with pytest.raises(InvalidRequest) as caught:
        choices(use_beam_search=True, **fields)
    assert caught.value.field == field


def test_a_search_has_no_log_probabilities_and_takes_what_asks_for_nothing() -> None:
    with pytest.raises(InvalidRequest, match="logprobs are not supported with beam search"):
        choices(use_beam_search=True, with_logprobs=True)
    choices(use_beam_search=True, min_tokens=0, repetition_penalty=1.0, presence_penalty=0.0, logit_bias={})


def test_a_conversation_is_searched_unless_it_asks_for_log_probabilities() -> None:
    model = SimpleNamespace(
        vocab_size=100,
        max_model_len=50,
        defaults=SamplingDefaults(),
        tokenizer=None,
        structured_outputs=SimpleNamespace(applied_to=lambda constraint: constraint),
    )
    config = SimpleNamespace(max_logprobs=5, return_tokens_as_token_ids=False)
    serving = SimpleNamespace(config=config, dialect=SimpleNamespace(can_choose=True))

    def asked(beam_search: BeamSearchParams | None = None, **fields: Any) -> Any:
        body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "n": 2, **fields})
        return _asked(body, model=cast("Any", model), serving=cast("Any", serving), beam_search=beam_search)

    found = asked(use_beam_search=True, max_tokens=7)
    assert (found.choices.beam_search.beam_width, found.choices.n, found.logprobs) == (2, 2, None)
    assert (found.params.max_tokens, found.params.logprobs) == (7, None)
    wide = BeamSearchParams(beam_width=5)
    assert asked(wide).choices.beam_search == wide
    for fields in ({"use_beam_search": True}, {"beam_search": wide}):
        with pytest.raises(InvalidRequest, match="logprobs are not supported with beam search") as caught:
            asked(**fields, logprobs=True)
        assert caught.value.field == "logprobs"
    plain = asked(logprobs=True, top_logprobs=3, max_completion_tokens=9, max_tokens=7)
    assert (plain.params.logprobs, plain.params.max_tokens, plain.choices.beam_search) == (3, 9, None)
    assert plain.logprobs is not None
    with pytest.raises(InvalidRequest) as caught:
        asked(max_completion_tokens=0)
    assert caught.value.field == "max_completion_tokens"
