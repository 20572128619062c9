"""A few rounds of chaos; `python -m tests.process.chaos` is the long run. And that the harness sees what it is for."""

import copy
from collections.abc import Callable

import pytest

from tests.process.chaos.chaos import Chaos, longest_gap
from tests.process.chaos.requests import KINDS, make_requests
from tests.process.chaos.stack import ChaosStack
from tests.process.transcript import Json, Transcript, differences

SEED = 5
PLAN = ("kill-both", "kill-worker", "drop-all", "kill-scheduler", "stop-worker")


async def test_clients_notice_nothing_but_a_pause() -> None:
    stack = ChaosStack()
    chaos = Chaos(stack=stack, requests=make_requests(len(KINDS), seed=SEED), seed=SEED)
    async with stack.run():
        await chaos.learn()
        rounds = [await chaos.break_once(fault) for fault in PLAN]
    assert all(one.num_streams > 0 for one in rounds), "every fault hit open streams"


def test_the_same_seed_makes_the_same_requests_of_every_kind() -> None:
    requests = make_requests(2 * len(KINDS), seed=1)
    assert requests == make_requests(2 * len(KINDS), seed=1)
    assert requests != make_requests(2 * len(KINDS), seed=2)
    assert {request.kind for request in requests} == set(KINDS)


def test_the_longest_gap_is_one_that_ends_after_the_fault() -> None:
    assert longest_gap([0, 5, 6, 9, 10], 5.5) == (6, 9)
    assert longest_gap([0, 5, 6, 9, 10], 3) == (0, 5)
    assert longest_gap([0, 5], 6) is None  # it had ended
    assert longest_gap([7, 8], 6) is None  # it had not begun


def chunks() -> list[Json]:
    """A chat stream of three tokens."""
    envelope = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas: list[Json] = [
        {"role": "assistant", "content": ""},
        {"content": "One"},
        {"content": " two"},
        {"content": "."},
    ]
    made = []
    for number, delta in enumerate(deltas):
        choice: Json = {"index": 0, "delta": delta, "finish_reason": "stop" if number == 3 else None}
        if number:
            entry = {"token": delta["content"], "logprob": -float(number), "top_logprobs": [{"logprob": -0.5}]}
            choice |= {"token_ids": [number], "logprobs": {"content": [entry]}}
        made.append({**envelope, "choices": [choice]})
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    return [*made, {**envelope, "choices": [], "usage": usage}]


def transcript_of(stream: list[Json], *, is_done: bool = True) -> Transcript:
    transcript = Transcript()
    for chunk in stream:
        transcript.take(chunk)
    transcript.is_done = is_done
    return transcript


def faults_of(stream: list[Json], *, is_done: bool = True) -> list[str]:
    """All that the harness would report about it."""
    got = transcript_of(stream, is_done=is_done)
    return [*got.own_faults(), *differences(transcript_of(chunks()), got)]


def set_text(stream: list[Json]) -> None:
    stream[2]["choices"][0]["delta"]["content"] = " too"


def set_token(stream: list[Json]) -> None:
    stream[2]["choices"][0]["token_ids"] = [9]


def set_logprob(stream: list[Json]) -> None:
    stream[2]["choices"][0]["logprobs"]["content"][0]["logprob"] -= 2e-4


def set_top_logprob(stream: list[Json]) -> None:
    stream[2]["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] -= 2e-4


def set_finish_reason(stream: list[Json]) -> None:
    stream[3]["choices"][0]["finish_reason"] = "length"


def set_usage(stream: list[Json]) -> None:
    stream[4]["usage"]["prompt_tokens"] = 5


def set_id(stream: list[Json]) -> None:
    stream[2]["id"] = "chatcmpl-2"


def repeat_chunk(stream: list[Json]) -> None:
    stream.insert(2, copy.deepcopy(stream[2]))


def lose_chunk(stream: list[Json]) -> None:
    del stream[2]


def repeat_end(stream: list[Json]) -> None:
    stream.insert(4, copy.deepcopy(stream[3]))


def lose_usage(stream: list[Json]) -> None:
    del stream[4]


def add_error(stream: list[Json]) -> None:
    stream.append({"error": {"message": "the worker was lost"}})


@pytest.mark.parametrize(
    "spoil",
    [
        set_text,
        set_token,
        set_logprob,
        set_top_logprob,
        set_finish_reason,
        set_usage,
        set_id,
        repeat_chunk,
        lose_chunk,
        repeat_end,
        lose_usage,
        add_error,
    ],
)
def test_a_stream_that_is_not_as_it_was_is_noticed(spoil: Callable[[list[Json]], None]) -> None:
    stream = chunks()
    spoil(stream)
    assert faults_of(stream)


def test_a_stream_that_is_as_it_was_has_no_faults() -> None:
    stream = chunks()
    stream[1]["choices"][0]["logprobs"]["content"][0]["logprob"] += 1e-6
    assert faults_of(stream) == []
    # In other pieces: what came while a client was held up comes at once.
    second, third = (chunk["choices"][0] for chunk in stream[2:4])
    second["delta"]["content"] += third["delta"]["content"]
    second["token_ids"] += third["token_ids"]
    second["logprobs"]["content"] += third["logprobs"]["content"]
    second["finish_reason"] = third["finish_reason"]
    del stream[3]
    assert faults_of(stream) == []


def test_a_stream_without_done_is_noticed() -> None:
    assert faults_of(chunks(), is_done=False) == ["no [DONE]"]
