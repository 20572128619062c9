"""Random combinations of sampling parameters against the real engine: every promise holds, together with the others."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pagoda_common.config.engine_config import CacheConfig, EngineConfig
from pagoda_common.text.tokenizer import Tokenizer
from tests.fakes.fake_scheduler import FakeScheduler
from tests.harness.engine import running_worker
from tests.harness.scheduler import running_scheduler
from tests.service.frontend.harness import MODEL, Running, frontend_at, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPLETIONS = "/v1/completions"
NUM_REQUESTS = 80
MAX_TOKENS = 14
ALLOWED = [*range(300, 420), 13, 14]
OPTIONS: dict[str, list[Any]] = {
    "temperature": [0, 0.5, 1, 2],
    "top_p": [0.5, 0.95],
    "top_k": [1, 5, 50],
    "min_p": [0.05],
    "presence_penalty": [-1, 1.5],
    "frequency_penalty": [-0.5, 2],
    "repetition_penalty": [0.8, 1.3],
    "logit_bias": [{"301": 5, "302": -100}, {"310": 100}],
    "allowed_token_ids": [ALLOWED],
    "bad_words": [["the", "a", "dog"], [" and"]],
    "min_tokens": [3, MAX_TOKENS],
    "ignore_eos": [True],
    "stop": ["e", ["zz", " "], "."],
    "stop_token_ids": [[13, 301, 310]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "logprobs": [0, 3],
    "prompt_logprobs": [1],
    "echo": [True],
    "n": [2],
    "truncate_prompt_tokens": [3],
    "add_special_tokens": [False],
    "return_tokens_as_token_ids": [True],
    "priority": [-5, 7],
    "cache_salt": ["s"],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Running]:
    config = EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=64 << 20))
    async with (
        running_scheduler(config) as scheduler,
        running_worker(scheduler.address),
        frontend_at(scheduler.address, FakeScheduler()) as running,
    ):
        await until(lambda: running.server.serving.is_ready, timeout_s=240)
        yield running


def bodies() -> list[dict[str, Any]]:
    choose = random.Random(5)
    made = []
    for number in range(NUM_REQUESTS):
        names = choose.sample(sorted(OPTIONS), choose.randint(1, 9))
        body = {name: choose.choice(OPTIONS[name]) for name in names}
        if body.get("temperature") == 0:
            body.pop("n", None)
        fixed = {"model": MODEL, "prompt": "Once upon a time there was", "max_tokens": MAX_TOKENS}
        made.append({**body, **fixed, "seed": number, "return_token_ids": True})
    return made


def check(body: dict[str, Any], choice: dict[str, Any], tokenizer: Tokenizer) -> None:
    tokens = choice["token_ids"]
    assert 1 <= len(tokens) <= MAX_TOKENS
    is_stopped = choice["finish_reason"] == "stop"
    assert is_stopped or len(tokens) == MAX_TOKENS
    assert len(tokens) >= body.get("min_tokens", 0)
    if "allowed_token_ids" in body:
        assert set(tokens) <= set(ALLOWED)
    for word in body.get("bad_words", ()):
        ids = tokenizer.encode(word, add_special_tokens=False)
        runs = [tokens[place : place + len(ids)] for place in range(len(tokens))]
        assert ids not in runs
    if body.get("ignore_eos"):
        assert choice["stop_reason"] is not None or not is_stopped
    for token in tokens[body.get("min_tokens", 0) : -1]:
        assert token not in body.get("stop_token_ids", ())
    stop = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
    if isinstance(choice["stop_reason"], str):
        assert choice["stop_reason"] in stop
        if body.get("include_stop_str_in_output"):
            assert choice["text"].endswith(choice["stop_reason"])
    if "logprobs" in body:
        num_echoed = len(choice["prompt_token_ids"]) if body.get("echo") else 0
        assert len(choice["logprobs"]["tokens"]) == len(tokens) + num_echoed
        assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
    has_prompt_logprobs = "prompt_logprobs" in body or (body.get("echo") and "logprobs" in body)
    if has_prompt_logprobs:
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
    if "truncate_prompt_tokens" in body:
        assert len(choice["prompt_token_ids"]) == 3


async def test_every_combination_keeps_every_promise_alone_together_and_as_a_stream(engine: Running) -> None:
    tokenizer = Tokenizer.load("pagoda-tiny")
    asked = bodies()
    responses = await asyncio.gather(*(engine.post(COMPLETIONS, body, timeout=200) for body in asked))
    for number, (body, response) in enumerate(zip(asked, responses, strict=True)):
        assert response.status_code == 200, (body, response.text)
        choices = response.json()["choices"]
        for choice in choices:
            check(body, choice, tokenizer)
        if number % 4 == 0:  # alone, what was sampled beside 79 others
            alone = (await engine.post(COMPLETIONS, body, timeout=200)).json()["choices"]
            assert [choice["token_ids"] for choice in alone] == [choice["token_ids"] for choice in choices], body
        if number % 4 == 1 and "prompt_logprobs" not in body:
            events = await engine.events(COMPLETIONS, **body)
            for choice in choices:
                parts = [event["choices"][0] for event in events[:-1]]
                own = [part for part in parts if part["index"] == choice["index"]]
                assert "".join(part["text"] for part in own) == choice["text"], body
                assert own[-1]["finish_reason"] == choice["finish_reason"]
    assert engine.server.serving.is_ready
