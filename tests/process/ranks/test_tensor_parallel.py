"""A model on two ranks, each a process: streams go on exactly when either of them is killed or stopped."""

import signal
from collections.abc import Iterator

import psutil
import pytest

from pagoda import LLM, SamplingParams
from tests.process.failures.test_recovery import stream
from tests.process.stack import MODULES, Stack

NUM_TOKENS = 100


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack("--tensor-parallel-size=2")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> str:
    return "".join(stream(stack, temperature=1.0, num_tokens=NUM_TOKENS))


def process_of(stack: Stack, rank: int) -> psutil.Process:
    """The worker process of a rank."""
    (process,) = (child for child in stack.children() if {MODULES["worker"], f"--rank={rank}"} <= set(child.cmdline()))
    return process


@pytest.mark.parametrize(("rank", "fault"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_stream_survives_the_loss_of_a_rank(stack: Stack, undisturbed: str, rank: int, fault: signal.Signals) -> None:
    victim, other = process_of(stack, rank), process_of(stack, 1 - rank)
    text, was_hit = "", False
    for piece in stream(stack, temperature=1.0, num_tokens=NUM_TOKENS):
        text += piece
        if not was_hit and len(text) > 40:
            victim.send_signal(fault)
            was_hit = True
    assert was_hit
    assert text == undisturbed
    assert process_of(stack, rank) != victim
    assert process_of(stack, 1 - rank) == other, "the other rank lives on, and keeps its weights"
    assert "sequences will be recomputed" in stack.log


def test_two_ranks_say_what_one_says_also_with_drafts_and_after_a_sleep() -> None:
    prompts = ["Once upon a time", "The dog and the dog and the dog and", "A"]
    params = SamplingParams(temperature=0, max_tokens=24)

    def texts(llm: LLM) -> list[str]:
        return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]

    with LLM() as one:
        assert one.get_world_size() == 1
        expected = texts(one)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(tensor_parallel_size=2, speculative_config=drafts) as two:
        assert two.get_world_size() == 2
        assert texts(two) == expected
        two.sleep(level=1)
        two.wake_up()
        assert texts(two) == expected
