"""A stream that is open while a process is killed goes on where it was, token for token."""

import json
import signal
import urllib.request
from collections.abc import Iterator

import pytest

from tests.process.stack import Stack

NUM_TOKENS = 300


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def stream(stack: Stack, *, temperature: float, num_tokens: int = NUM_TOKENS) -> Iterator[str]:
    """Pieces of a long answer, which the end token does not end."""
    body = {
        "model": "pagoda-tiny",
        "messages": [{"role": "user", "content": "Tell me a story about a dog."}],
        "stream": True,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": 11,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)["choices"][0]["delta"].get("content") or ""


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> dict[float, str]:
    """The answer at each temperature."""
    return {temperature: "".join(stream(stack, temperature=temperature)) for temperature in (0.0, 1.0)}


@pytest.mark.parametrize(
    ("name", "fault", "temperature"),
    [
        ("worker", signal.SIGKILL, 0.0),
        ("scheduler", signal.SIGKILL, 1.0),
        ("worker", signal.SIGSTOP, 1.0),
        ("scheduler", signal.SIGSTOP, 1.0),
    ],
)
def test_a_stream_survives(
    stack: Stack, undisturbed: dict[float, str], name: str, fault: signal.Signals, temperature: float
) -> None:
    victim = stack.service(name)
    text = ""
    was_killed = False
    for piece in stream(stack, temperature=temperature):
        text += piece
        if not was_killed and len(text) > 40:
            victim.send_signal(fault)
            was_killed = True
    assert was_killed
    assert text == undisturbed[temperature]
    stack.wait_ready()
