"""Beam search and best_of: what reaches the engine, and which sequences come back."""

from typing import Any

import pytest

from pagoda.v1 import types_pb2
from tests.service.frontend.harness import MODEL, Running

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


async def test_a_beam_search_gives_the_hypotheses_in_order(frontend: Running) -> None:
    answer = await frontend.complete(
        use_beam_search=True, n=2, best_of=4, temperature=0, max_tokens=3, length_penalty=0.5, return_token_ids=True
    )
    tokens = [choice["token_ids"] for choice in answer["choices"]]
    assert tokens == [frontend.fake.tokens([5, 6, 7], 3, index) for index in range(2)]
    [submitted] = frontend.fake.submits
    assert submitted.beam_search.beam_width == 4
    assert submitted.beam_search.length_penalty == 0.5
    assert submitted.sampling_params.n == 2
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, types_pb2.EARLY_STOPPING_HEURISTIC),
        (False, types_pb2.EARLY_STOPPING_HEURISTIC),
        (True, types_pb2.EARLY_STOPPING_FIRST),
        ("never", types_pb2.EARLY_STOPPING_NEVER),
    ],
)
async def test_early_stopping_is_as_in_transformers(frontend: Running, given: Any, expected: int) -> None:
    await frontend.complete(use_beam_search=True, n=2, early_stopping=given)
    assert frontend.fake.submits[-1].beam_search.early_stopping == expected


async def test_a_stream_of_a_beam_search_comes_at_the_end(frontend: Running) -> None:
    events = await frontend.events(
        "/v1/completions", prompt=[5], use_beam_search=True, n=2, max_tokens=3, stream_options={"include_usage": True}
    )
    finished = [choice["index"] for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(finished) == [0, 1]
    assert events[-2]["usage"]["completion_tokens"] == 6


async def test_a_conversation_can_be_searched(frontend: Running) -> None:
    body = {"model": MODEL, **CHAT, "use_beam_search": True, "n": 3, "temperature": 0, "max_tokens": 2}
    response = await frontend.post("/v1/chat/completions", body)
    assert len(response.json()["choices"]) == 3
    assert frontend.fake.submits[-1].beam_search.beam_width == 3
    refused = await frontend.post("/v1/chat/completions", {**body, "logprobs": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


async def test_a_lost_beam_search_begins_again(frontend: Running) -> None:
    frontend.fake.drop_after = 1
    answer = await frontend.complete(use_beam_search=True, n=2, max_tokens=3, return_token_ids=True)
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        frontend.fake.tokens([5, 6, 7], 3, index) for index in range(2)
    ]
    assert not any(submit.HasField("resume") for submit in frontend.fake.submits)


async def test_the_best_of_several_are_returned_without_their_logprobs(frontend: Running) -> None:
    # Sequence 2 is the likeliest, then sequence 1.
    frontend.fake.logprob_of = dict.fromkeys(frontend.fake.tokens([5, 6, 7], 2, 2), -0.1)
    frontend.fake.logprob_of |= dict.fromkeys(frontend.fake.tokens([5, 6, 7], 2, 1), -0.2)
    answer = await frontend.complete(n=2, best_of=3, max_tokens=2, return_token_ids=True)
    choices = answer["choices"]
    assert [choice["token_ids"] for choice in choices] == [
        frontend.fake.tokens([5, 6, 7], 2, index) for index in (2, 1)
    ]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(choice["logprobs"] is None for choice in choices)
    assert frontend.fake.submits[-1].sampling_params.logprobs == 0
    assert answer["usage"]["completion_tokens"] == 6


async def test_the_best_of_each_prompt_stay_with_their_prompt(frontend: Running) -> None:
    answer = await frontend.complete(prompt=[[5], [900]], best_of=2, max_tokens=2, logprobs=1, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[5], [900]]
    assert all(len(choice["logprobs"]["tokens"]) == 2 for choice in answer["choices"])


async def test_the_best_of_each_prompt_are_shown_with_that_prompt(frontend: Running) -> None:
    body = {"prompt": [[5, 6], [9]], "best_of": 3, "n": 1, "max_tokens": 1, "return_token_ids": True}
    answer = await frontend.complete(**body)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[5, 6], [9]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
