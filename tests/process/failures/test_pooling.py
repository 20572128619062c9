"""Texts that are to become vectors or scores survive kills of worker and scheduler: computed again, no error."""

import concurrent.futures
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.encoders import hidden_of, make_encoder, prompts_of, write_modules
from tests.process.stack import Stack, poll_until

NUM_INPUTS = 200
LENGTHS = tuple(40 + 7 * (number % 60) for number in range(NUM_INPUTS))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Any]]:
    directory = tmp_path_factory.mktemp("bert")
    model = make_encoder("BertModel", directory, num_hidden_layers=6)
    write_modules(directory, "mean_tokens")
    # A worker that stands by: one that starts imports transformers first, which a busy machine takes a minute for.
    flags = ("--dtype=float32", "--max-num-batched-tokens=512", "--standby-workers=1", "--threads=1")
    stack = Stack(str(directory), "--served-model-name=tiny", *flags)
    try:
        stack.wait_ready()
        yield stack, model
    finally:
        stack.end()


def post(stack: Stack, prompts: list[list[int]]) -> list[list[float]]:
    body = {"model": "tiny", "input": prompts}
    answer = httpx.post(f"{stack.url}/v1/embeddings", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


def wait_until_running(stack: Stack) -> None:
    """Until the frontend hears that the engine computes some input."""

    def is_running() -> bool:
        text = httpx.get(f"{stack.url}/metrics", timeout=240).text
        return any(float(value) > 0 for value in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.M))

    poll_until(is_running, what="inputs are computed", log=lambda: stack.log)


@pytest.mark.parametrize("victims", [("worker",), ("scheduler",), ("worker", "scheduler", "worker")])
def test_nothing_is_lost(served: tuple[Stack, Any], victims: tuple[str, ...]) -> None:
    stack, model = served
    prompts = prompts_of(LENGTHS)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(post, stack, prompts) for _ in range(2)]
        for victim in victims:
            wait_until_running(stack)
            stack.service(victim).send_signal(signal.SIGKILL)
        was_open = not all(future.done() for future in futures)
        answers = [future.result() for future in futures]
    assert was_open, "the kill came in the middle"
    for place in range(0, NUM_INPUTS, 37):
        mean = hidden_of(model, prompts[place]).mean(0)
        wanted = np.asarray(mean / mean.norm())
        for answer in answers:
            np.testing.assert_allclose(answer[place], wanted, atol=1e-5)


def test_a_call_of_2048_inputs_survives_a_kill(served: tuple[Stack, Any]) -> None:
    stack, model = served
    prompts = prompts_of([20 + number % 50 for number in range(2048)])
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        future = threads.submit(post, stack, prompts)
        wait_until_running(stack)
        stack.service("worker").send_signal(signal.SIGKILL)
        assert not future.done(), "the kill came in the middle"
        answer = future.result()
    for place in range(0, 2048, 401):
        mean = hidden_of(model, prompts[place]).mean(0)
        np.testing.assert_allclose(answer[place], np.asarray(mean / mean.norm()), atol=1e-5)


def test_a_client_that_leaves_takes_its_texts_with_it(served: tuple[Stack, Any]) -> None:
    stack, _ = served
    body = {"model": "tiny", "input": prompts_of(LENGTHS * 10)}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{stack.url}/v1/embeddings", json=body, timeout=httpx.Timeout(60, read=1.0))
    deadline = time.monotonic() + 240
    while (load := httpx.get(f"{stack.url}/load", timeout=60).json())["server_load"]:
        assert time.monotonic() < deadline, load
        time.sleep(0.1)
    assert len(post(stack, prompts_of([5, 6]))) == 2
