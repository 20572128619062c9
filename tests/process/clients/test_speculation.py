"""Streams whose tokens come several a step survive their worker and their scheduler, token for token."""

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.stack import Stack

CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
NUM_STREAMS, NUM_TOKENS = 6, 200


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack(f"--speculative-config={json.dumps(CONFIG)}")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def stream(stack: Stack, number: int, heard: threading.Semaphore | None = None) -> str:
    """The text of one answer to a prompt that goes round, greedy or seeded; `heard` counts its events."""
    body = {
        "model": "pagoda-tiny",
        "prompt": [300 + (number + place % (3 + number)) * 7 for place in range(30)],
        "stream": True,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0.4 * (number % 2),
        "seed": number,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.url}/v1/completions", json.dumps(body).encode(), headers)
    text = ""
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                text += json.loads(data)["choices"][0]["text"]
                if heard is not None:
                    heard.release()
    return text


def accepted(stack: Stack) -> float:
    """Guesses that were right so far."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=240) as response:
        lines = response.read().decode().splitlines()
    name = "vllm:spec_decode_num_accepted_tokens_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("name", ["worker", "scheduler"])
def test_streams_survive_a_kill(stack: Stack, name: str) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        undisturbed = list(threads.map(lambda number: stream(stack, number), range(NUM_STREAMS)))
        assert accepted(stack) > 0
        victim, heard = stack.service(name), threading.Semaphore(0)
        answers = [threads.submit(stream, stack, number, heard) for number in range(NUM_STREAMS)]
        for _ in range(20 * NUM_STREAMS):
            assert heard.acquire(timeout=240)
        victim.send_signal(signal.SIGKILL)
        assert [answer.result(timeout=240) for answer in answers] == undisturbed
    stack.wait_ready()
