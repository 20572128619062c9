"""Streams under constraints survive kill -9 of the worker and of the scheduler, token for token, and so do new ones."""

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.process.stack import Stack, poll_until

REGEXES = ("([a-z]{1,6} ){60}end", "([0-9]{2},){120}", "(yes|no|maybe) ([a-f]{3} ){70}")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack('--speculative-config={"method": "ngram", "num_speculative_tokens": 3}')
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


class Stream:
    """Two sequences under one regex."""

    def __init__(self, stack: Stack, regex: str) -> None:
        self.texts = ["", ""]
        self.last = ""
        self.body: dict[str, Any] = {
            "prompt": "Once upon a time",
            "n": 2,
            "seed": 7,
            "temperature": 1,
            "max_tokens": 400,
            "stream": True,
            "structured_outputs": {"regex": regex},
        }
        self._url = f"{stack.url}/v1/completions"
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self.body, timeout=240) as response:
            for line in response.iter_lines():
                if line.startswith("data:"):
                    self.last = line
                    if line != "data: [DONE]":
                        for choice in json.loads(line.removeprefix("data:"))["choices"]:
                            self.texts[choice["index"]] += choice["text"]

    def end(self) -> list[str]:
        self.thread.join()
        assert self.last == "data: [DONE]", self.last
        return self.texts


def test_constrained_streams_survive_kills(stack: Stack) -> None:
    expected = [Stream(stack, regex).end() for regex in REGEXES]
    for name in ("worker", "scheduler"):
        streams = [Stream(stack, regex) for regex in REGEXES[:2]]
        poll_until(lambda streams=streams: all(all(each.texts) for each in streams), what="the streams have begun")
        victim = stack.service(name)
        victim.send_signal(signal.SIGKILL)
        streams.append(Stream(stack, REGEXES[2]))
        poll_until(lambda victim=victim: not psutil.pid_exists(victim.pid), what=f"the {name} is gone")
        assert [each.end() for each in streams] == expected
