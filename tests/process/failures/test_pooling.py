"""Texts that are to become vectors or scores survive kills of worker and scheduler: computed again, no error."""

import concurrent.futures
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.encoders import hidden_of, make_encoder, prompts_of, write_modules
from tests.process.stack import Stack

NUM_INPUTS = 500
LENGTHS = tuple(40 + 7 * (number % 60) for number in range(NUM_INPUTS))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Any]]:
    directory = tmp_path_factory.mktemp("bert")
    model = make_encoder("BertModel", directory, num_hidden_layers=6)
    write_modules(directory, "mean_tokens")
    # A worker that stands by: one that starts imports transformers first, which a busy machine takes a minute for.
    flags = ("--dtype=float32", "--max-num-batched-tokens=1024", "--standby-workers=1", "--threads=1")
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


@pytest.mark.parametrize("victims", [("worker",), ("scheduler",)])
def test_nothing_is_lost(served: tuple[Stack, Any], victims: tuple[str, ...]) -> None:
    stack, model = served
    prompts = prompts_of(LENGTHS)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(post, stack, prompts) for _ in range(2)]
        for victim in victims:
            time.sleep(0.5)
            stack.service(victim).send_signal(signal.SIGKILL)
        was_open = not all(future.done() for future in futures)
        answers = [future.result() for future in futures]
    assert was_open, "the kill came in the middle"
    for place in range(0, NUM_INPUTS, 97):
        mean = hidden_of(model, prompts[place]).mean(0)
        wanted = np.asarray(mean / mean.norm())
        for answer in answers:
            np.testing.assert_allclose(answer[place], wanted, atol=1e-5)
