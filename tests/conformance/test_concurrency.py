"""Many at once: what a request gets does not depend on who else is served."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.conformance.api import CHAT, COMPLETIONS, MODEL, Api, Json, chat_body

WORDS = ["dog", "moon", "river", "robot", "Anna", "the sea", "a fox", "rain", "bread", "a king"]


def mixed(seed: int) -> tuple[str, Json]:
    """A request of any kind: path and body; its answer is determined by them."""
    draw = random.Random(seed)
    topic = draw.choice(WORDS)
    fields: Json = {"max_tokens": draw.randrange(1, 40), "temperature": draw.choice([0, 0.7, 1.0, 1.5]), "seed": seed}
    extras: list[Json] = [
        {},
        {"n": 1 + seed % 3, "temperature": 1.0},
        {"stop": ["a", "."]},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.05, "presence_penalty": 1.0},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"logit_bias": {"300": 3.0}, "min_tokens": 1},
        {"bad_words": ["the"], "ignore_eos": True},
        {"allowed_token_ids": list(range(4, 600))},
    ]
    fields |= draw.choice(extras)
    if draw.random() < 0.5:
        return CHAT, chat_body(f"Tell me a story about {topic}.", **fields)
    prompt = f"Once upon a time there was {topic}. " * draw.randrange(1, 12)
    return COMPLETIONS, {"model": MODEL, "prompt": prompt, **fields}


def outcome(api: Api, seed: int, *, stream: bool) -> list[Any]:
    path, body = mixed(seed)
    if stream:
        answer = api.stream(path, body)
        return [(answer.text(index), answer.finish_reason(index)) for index in range(body.get("n", 1))]
    choices = api.ok(path, body)["choices"]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    return list(zip(texts, [choice["finish_reason"] for choice in choices], strict=True))


def test_64_mixed_requests_at_once_are_answered_as_one_by_one(api: Api) -> None:
    seeds = range(64)
    with ThreadPoolExecutor(max_workers=64) as pool:
        together = list(pool.map(lambda seed: outcome(api, seed, stream=seed % 2 == 0), seeds))
    assert together == [outcome(api, seed, stream=seed % 2 == 1) for seed in seeds]


def test_refusals_among_them_disturb_nobody(api: Api) -> None:
    expected = outcome(api, 7, stream=False)

    def good_or_bad(number: int) -> list[Any]:
        if number % 2:
            api.refused(CHAT, chat_body(temperature=9), param="temperature")
            return expected
        return outcome(api, 7, stream=False)

    with ThreadPoolExecutor(max_workers=16) as pool:
        assert list(pool.map(good_or_bad, range(32))) == [expected] * 32


def test_prompts_of_one_request_are_answered_as_alone(api: Api) -> None:
    prompts = [f"{word} was" for word in WORDS]
    together = [choice["text"] for choice in api.complete(prompt=prompts, max_tokens=12)["choices"]]
    assert together == [api.text(prompt=prompt, max_tokens=12) for prompt in prompts]
