"""Streams of models whose layers keep different things of a sequence survive kills, and sleep, token for token.

`python -m tests.models.circumstances` does the same to every family.
"""

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.process.stack import Stack

FAMILIES = ("GptOssForCausalLM", "Qwen3NextForCausalLM")
"""Windows and sinks, the delta rule. Losses of other families' services are in tests/exactness/test_losses.py."""
NUM_TOKENS = 300
PROMPTS = ([7, 9, 11] * 20, [30, 31, 32, 33, 34] * 7)


@pytest.fixture(scope="module", params=[*FAMILIES, "transformers"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    is_hosted = request.param == "transformers"  # windows and sinks in a module of theirs
    family = "GptOssForCausalLM" if is_hosted else request.param
    directory = make_checkpoint(family, tmp_path_factory.mktemp(request.param))
    with serving(directory, f"--model-impl={'transformers' if is_hosted else 'auto'}") as stack:
        yield stack


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[Stack]:
    """A `pagoda serve` of a checkpoint, for `Streams`."""
    options += ("--dtype=float32", "--kv-cache-memory=64M", "--enable-sleep-mode", "--snapshot-interval=64")
    stack = Stack(str(directory), "--served-model-name=tiny", *options)
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


class Streams:
    """One greedy and one seeded stream at once, of so many tokens each."""

    def __init__(self, stack: Stack, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.tokens: list[list[int]] = [[], []]
        self._errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._follow, args=(stack, number)) for number in range(2)]
        for thread in self._threads:
            thread.start()

    def _follow(self, stack: Stack, number: int) -> None:
        body = {
            "model": "tiny",
            "prompt": PROMPTS[number],
            "stream": True,
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "temperature": float(number),
            "seed": 5,
            "return_token_ids": True,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{stack.url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                for line in response:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        event = json.loads(data)
                        self.tokens[number] += event["choices"][0].get("token_ids") or []
        except Exception as error:  # told by `end`
            self._errors.append(error)

    def wait_for(self, num_tokens: int) -> None:
        """Return when both have so many tokens, and one of them has not all. Nothing keeps them level."""
        while min(map(len, self.tokens)) < num_tokens and any(thread.is_alive() for thread in self._threads):
            time.sleep(0.005)
        assert not self._errors
        assert min(map(len, self.tokens)) < self._num_tokens, "one of them is not done yet"

    def end(self) -> list[list[int]]:
        for thread in self._threads:
            thread.join()
        assert not self._errors
        return self.tokens


def post(stack: Stack, path: str) -> None:
    response = httpx.post(f"{stack.url}{path}", timeout=240)
    assert response.status_code == 200, response.text


def sleep_and_wake(stack: Stack) -> None:
    post(stack, "/sleep?level=1")
    post(stack, "/wake_up")


def kill(name: str) -> Callable[[Stack], None]:
    return lambda stack: stack.service(name).send_signal(signal.SIGKILL)


def test_streams_go_on_where_they_were(stack: Stack) -> None:
    check_streams(stack, NUM_TOKENS)


def check_streams(stack: Stack, num_tokens: int) -> None:
    """They end as they do undisturbed.

    Args:
        num_tokens: so many that both last until the third disturbance, and that each is over before the next begins.
    """
    undisturbed = Streams(stack, num_tokens).end()
    assert [len(tokens) for tokens in undisturbed] == [num_tokens] * 2
    streams = Streams(stack, num_tokens)
    for share, disturb in ((40, kill("worker")), (90, sleep_and_wake), (140, kill("scheduler"))):
        reached = num_tokens * share // 300
        streams.wait_for(reached)
        for tokens, right in zip(map(list, streams.tokens), undisturbed, strict=True):
            assert tokens == right[: len(tokens)], f"before token {reached}"
        disturb(stack)
    assert streams.end() == undisturbed
