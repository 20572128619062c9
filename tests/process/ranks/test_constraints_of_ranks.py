"""Constraints of a model on two ranks: while they are compiled others' streams go on, also when a rank is killed."""

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.process.failures.test_recovery import stream
from tests.process.ranks.test_tensor_parallel import process_of
from tests.process.stack import Stack, poll_until

NUM_TOKENS = 240
LENGTH = 30_000
"""Of a regular expression: each takes a good part of a second, and one at a time is compiled."""
LETTERS = "bcd"


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


class Victim:
    """Reads a stream that has no constraint."""

    def __init__(self, stack: Stack) -> None:
        self.pieces: list[str] = []
        self._stack = stack
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for piece in stream(self._stack, temperature=1.0, num_tokens=NUM_TOKENS):
            self.pieces.append(piece)

    def wait_for(self, num_pieces: int) -> None:
        poll_until(lambda: len(self.pieces) >= num_pieces, what=f"{num_pieces} pieces of the stream")

    def text(self) -> str:
        """All of it, once it has ended."""
        self._thread.join()
        return "".join(self.pieces)


def constrained(stack: Stack, letter: str, length: int) -> tuple[str, str]:
    """A text under a regular expression that no one has asked for before, and why it ended."""
    regex = f"[{letter}{letter.upper()}]" * (length // 4) + letter * (length % 4)
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 1.0, "structured_outputs": {"regex": regex}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        choice = json.load(response)["choices"][0]
        return choice["text"], choice["finish_reason"]


def assert_right(answer: tuple[str, str], letter: str) -> None:
    text, reason = answer
    assert text, "at least a letter a token"
    assert set(text.lower()) == {letter}
    assert reason == "length"


@pytest.mark.parametrize(
    ("killed_rank", "num_answers"),
    [(None, 0), (1, 0), (1, 1), (0, 1)],
    ids=["none", "1-at-once", "1-amid-them", "0-amid-them"],
)
def test_a_stream_goes_on_while_constraints_are_compiled(
    stack: Stack, undisturbed: str, killed_rank: int | None, num_answers: int
) -> None:
    """A rank is killed when `num_answers` constrained requests have been answered; the others wait for theirs."""
    length = LENGTH + 10 * num_answers + (0 if killed_rank is None else 1 + killed_rank)  # compiled by no case before
    victim = Victim(stack)
    victim.wait_for(20)
    with ThreadPoolExecutor(len(LETTERS)) as threads:
        answers: list[Future[tuple[str, str]]] = [
            threads.submit(constrained, stack, letter, length) for letter in LETTERS
        ]
        num_before = len(victim.pieces)
        victim.wait_for(num_before + 3)
        if killed_rank is None:
            poll_until(lambda: any(answer.done() for answer in answers), what="a constrained answer")
            assert len(victim.pieces) > num_before + 5, "steps do not wait for constraints"
        else:
            poll_until(
                lambda: sum(answer.done() for answer in answers) >= num_answers,
                what=f"{num_answers} constrained answers",
            )
            killed = process_of(stack, killed_rank)
            killed.send_signal(signal.SIGKILL)
        for answer, letter in zip(answers, LETTERS, strict=True):
            assert_right(answer.result(), letter)
    assert victim.text() == undisturbed
    if killed_rank is not None:
        assert process_of(stack, killed_rank) != killed
    assert "Traceback" not in stack.log
