"""One request with many prompts fills queue and slots: another client's stream begins at once, kills included."""

import json
import signal
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.process.stack import Stack, ask, poll_until

NUM_SLOTS = 24
NUM_PROMPTS, N = 30, 2
LARGE = {
    "prompt": [f"Once upon a time there was number {number}" for number in range(NUM_PROMPTS)],
    "n": N,
    "max_tokens": 200,
    "ignore_eos": True,
    "stream": True,
}


class LargeCall:
    """A stream of many sequences, read by a thread."""

    def __init__(self, url: str) -> None:
        self.num_tokens = [0] * (NUM_PROMPTS * N)
        self.num_ended = 0
        self.last = ""
        self._url = url
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=LARGE, timeout=240) as response:
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                self.last = line
                if line == "data: [DONE]":
                    return
                for choice in json.loads(line.removeprefix("data:")).get("choices", ()):
                    self.num_tokens[choice["index"]] += 1
                    self.num_ended += choice["finish_reason"] is not None


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack(f"--max-num-seqs={NUM_SLOTS}")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def test_a_stream_of_another_client_does_not_wait_for_a_large_call(stack: Stack) -> None:
    expected = ask(stack.url)
    large = LargeCall(stack.url)
    try:
        poll_until(lambda: sum(map(bool, large.num_tokens)) >= NUM_SLOTS, what="the large call has all slots")
        assert ask(stack.url) == expected
        assert large.num_ended < NUM_SLOTS, "the others of the large call came first"
        worker = stack.service("worker")
        worker.send_signal(signal.SIGKILL)
        poll_until(lambda: not psutil.pid_exists(worker.pid), what="the worker is gone")
        num_ended = large.num_ended
        assert ask(stack.url) == expected
        assert large.num_ended < num_ended + NUM_SLOTS, "the others of the large call came first"
    finally:
        large.thread.join()
    assert large.last == "data: [DONE]"
    assert large.num_ended == NUM_PROMPTS * N
