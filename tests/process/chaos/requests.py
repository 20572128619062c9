"""The requests of the chaos harness: streams of every kind, long enough that a fault hits them in the middle."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

MODEL = "pagoda-tiny"
SUBJECTS = (
    "a dog",
    "a little girl",
    "two friends in a park",
    "the old boat",
    "a cat who was afraid",
    "rain",
    "a red ball",
)
SCHEMA: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "friends": {"type": "array", "items": {"type": "string"}, "minItems": 12, "maxItems": 16},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "tell_story",
        "parameters": {
            "type": "object",
            "properties": {"title": {"type": "string"}, "story": {"type": "string", "minLength": 200}},
            "required": ["title", "story"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One client's request; its answer depends on nothing else."""

    kind: str
    path: str
    body: Json

    def __str__(self) -> str:
        return f"{self.kind} {self.path} {self.body}"


def make_requests(num: int, *, seed: int, models: Sequence[str] = (MODEL,)) -> list[ChaosRequest]:
    """`num` requests, of every kind about equally many; the same for the same seed. `models`: in turn."""
    kinds = list(KINDS)
    return [
        make_request(
            kinds[number % len(kinds)], random.Random(f"{seed}:{number}"), models[number // len(kinds) % len(models)]
        )
        for number in range(num)
    ]


def make_request(kind: str, draw: random.Random, model: str = MODEL) -> ChaosRequest:
    """A request of `kind` with drawn values."""
    body: Json = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": draw.randrange(100, 200),
        "seed": draw.randrange(1 << 31),
        **KINDS[kind](draw),
    }
    if "input" in body:
        return ChaosRequest(kind, "/v1/embeddings", {"model": MODEL, "input": body["input"]})
    if "prompt" in body:
        return ChaosRequest(kind, "/v1/completions", body)
    body["messages"] = [{"role": "user", "content": f"Tell me a story about {draw.choice(SUBJECTS)}."}]
    return ChaosRequest(kind, "/v1/chat/completions", body)


def _temperature(draw: random.Random) -> float:
    return draw.choice([0.0, 0.7, 1.0])


def _prompt(draw: random.Random) -> str:
    return f"Once upon a time there was {draw.choice(SUBJECTS)}."


def _greedy(draw: random.Random) -> Json:
    return {"temperature": 0.0, "ignore_eos": True}


def _seeded(draw: random.Random) -> Json:
    return {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "ignore_eos": True}


def _several(draw: random.Random) -> Json:
    return {"n": 2, "temperature": 1.0, "ignore_eos": True, "max_tokens": draw.randrange(60, 120)}


def _logprobs(draw: random.Random) -> Json:
    return {"logprobs": True, "top_logprobs": 3, "temperature": _temperature(draw), "ignore_eos": True}


def _penalties(draw: random.Random) -> Json:
    penalties = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.15}
    return {**penalties, "logit_bias": {"13": -5.0}, "temperature": _temperature(draw), "ignore_eos": True}


def _min_tokens(draw: random.Random) -> Json:
    return {"min_tokens": draw.randrange(60, 100), "temperature": _temperature(draw)}


def _stop(draw: random.Random) -> Json:
    return {
        "prompt": _prompt(draw),
        "stop": [".", " and they"],
        "min_tokens": draw.randrange(60, 90),
        "include_stop_str_in_output": draw.random() < 0.5,
        "temperature": _temperature(draw),
        "ignore_eos": True,
    }


def _json_schema(draw: random.Random) -> Json:
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    return {"response_format": response_format, "temperature": 1.0}


def _tools(draw: random.Random) -> Json:
    return {"tools": [TOOL], "tool_choice": "required", "temperature": 1.0}


def _echo(draw: random.Random) -> Json:
    return {"prompt": _prompt(draw), "echo": True, "logprobs": 2, "n": 2, "temperature": 0.8, "ignore_eos": True}


def _embed(draw: random.Random) -> Json:
    return {"input": [f"{_prompt(draw)} {_prompt(draw)} {draw.randrange(1000)}" for _ in range(16)]}


KINDS: dict[str, Callable[[random.Random], Json]] = {
    "greedy": _greedy,
    "seeded": _seeded,
    "n": _several,
    "logprobs": _logprobs,
    "penalties": _penalties,
    "min_tokens": _min_tokens,
    "stop": _stop,
    "json_schema": _json_schema,
    "tools": _tools,
    "echo": _echo,
    "embed": _embed,
}
