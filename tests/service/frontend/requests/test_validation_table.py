"""The bounds of every sampling parameter over HTTP: its last good values pass, the first bad ones name the bound."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from tests.service.frontend.harness import MODEL, Running, running_frontend

pytestmark = pytest.mark.asyncio(loop_scope="module")
VOCAB_SIZE = 3072
LONG_WORD = ["x y " * 300]
LONG = [f"word{number}" for number in range(129)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend() -> AsyncIterator[Running]:
    async with running_frontend() as running:
        yield running


@dataclass(frozen=True)
class Row:
    """One parameter."""

    name: str
    good: list[Any]
    bad: list[tuple[Any, str]]
    """Values, and what the message must say besides the name: the value or the bound, parts separated by |."""
    others: dict[str, Any] = field(default_factory=dict)
    """Further fields of the body."""


TABLE = [
    Row("n", [1, 3, None], [(0, "at least 1|0"), (-1, "at least 1|-1"), (16385, "16384|16385"), (1.5, "integer")]),
    Row("n", [1], [(2, "temperature|2")], {"temperature": 0}),
    Row("presence_penalty", [-2, 2, 0.5], [(-2.01, "[-2, 2]|-2.01"), (2.01, "[-2, 2]|2.01"), ("one", "number")]),
    Row("frequency_penalty", [-2, 2, 0.5], [(-2.01, "[-2, 2]|-2.01"), (2.01, "[-2, 2]|2.01"), ([], "number")]),
    Row("repetition_penalty", [0.01, 1, 100], [(0, "greater than 0|0"), (-1, "greater than 0|-1"), ("x", "number")]),
    Row(
        "temperature",
        [0, 1e-6, 0.005, 2, "0.5", True],
        [(-0.1, "[0, 2]|-0.1"), (2.01, "[0, 2]|2.01"), ("hot", "number")],
    ),
    Row("top_p", [0.001, 1], [(0, "(0, 1]|0"), (1.01, "(0, 1]|1.01"), (-1, "(0, 1]|-1")]),
    Row("top_k", [-1, 0, 1, 10**6], [(-2, "at least -1|between -1|-2"), (1.5, "integer")]),
    Row("min_p", [0, 1], [(-0.01, "[0, 1]|-0.01"), (1.01, "[0, 1]|1.01")]),
    Row("seed", [-1, 0, 2**63 - 1, -(2**63)], [("x", "integer"), (2**64, "between|18446744073709551616")]),
    Row("stop", [None, "a", [], ["a"] * 128], [(["a"] * 129, "at most 128|129"), ("", "empty"), (["a", ""], "empty")]),
    Row(
        "stop_token_ids",
        [[], [5, 5], [VOCAB_SIZE - 1]],
        [([VOCAB_SIZE], "below 3072|3072"), ([-1], "-1"), ("x", "list")],
    ),
    Row("ignore_eos", [True, False, None, "true", "no", 1], [("maybe", "boolean")]),
    Row(
        "max_tokens", [1, 10**6, None, "7", 7.0, True], [(0, "at least 1|between 1|0"), (-5, "-5"), ("many", "integer")]
    ),
    Row("min_tokens", [0, 4], [(-1, "at least 0|between 0|-1"), (5, "at most max_tokens (4)|5")], {"max_tokens": 4}),
    Row("logprobs", [None, 0, 20], [(-1, "at most 20|-1"), (21, "at most 20|21"), (-2, "at least -1|-2")]),
    Row("prompt_logprobs", [None, 0, 20], [(-1, "at most 20|-1"), (21, "at most 20|21"), (-2, "at least -1|-2")]),
    Row("prompt_logprobs", [None], [(0, "stream"), (1, "stream"), (-1, "stream")], {"stream": True}),
    Row(
        "logprob_token_ids",
        [None, [], [1, 2], list(range(128))],
        [(list(range(129)), "at most 128|129"), ([VOCAB_SIZE], "below 3072|3072"), ([-1], "-1")],
        {"logprobs": 0},
    ),
    Row("logprob_token_ids", [None, []], [([1], "needs logprobs")]),
    Row("logprobs", [0, 2], [(1, "(2)|1"), (3, "(2)|3")], {"logprob_token_ids": [1, 2]}),
    Row("skip_special_tokens", [True, False, None, "off"], [(2, "boolean")]),
    Row("spaces_between_special_tokens", [True, False, None], [(5, "boolean")]),
    Row("include_stop_str_in_output", [True, False, None], [([], "boolean")]),
    Row(
        "logit_bias",
        [None, {}, {"5": 1000}, {str(VOCAB_SIZE - 1): -1000}],
        [
            ({"x": 1}, "token ids|x"),
            ({str(VOCAB_SIZE): 1}, "below 3072|3072"),
            ({"-1": 1}, "-1"),
            ({"5": "x"}, "number"),
        ],
    ),
    Row(
        "allowed_token_ids",
        [None, [0], [VOCAB_SIZE - 1]],
        [([], "empty"), ([VOCAB_SIZE], "below 3072|3072"), ([-1], "-1"), ([1.5], "integer")],
    ),
    Row(
        "bad_words",
        [None, [], ["a"] * 64],
        [
            ([""], "empty"),
            ([" "], "empty"),
            (LONG, "at most 128|129"),
            (LONG_WORD, "at most 256"),
            ([5], "string"),
        ],
    ),
    Row(
        "vllm_xargs",
        [None, {}, {"a": [1, "x", 0.5, None, {"b": True}]}, {"a": 2**63 - 1}],
        [({"a": 2**63}, "64 bits|9223372036854775808"), (5, "dictionary"), ([1], "dictionary")],
    ),
    Row(
        "truncate_prompt_tokens",
        [None, -1, 1, 496],
        [(-2, "at least -1|-2"), (497, "at most 496|497"), (0.5, "integer")],
    ),
    Row("truncation_side", [None, "left", "right"], [("both", "'left' or 'right'")]),
    Row(
        "cache_salt",
        [None, "x" * 128, "salt-1"],
        [("", "not be empty"), ("x" * 129, "128"), *((f"a{c}b", "NUL") for c in "@/\\\0")],
    ),
    Row("priority", [0, -(2**63), 2**63 - 1], [(2**63, "64 bits|9223372036854775808"), ("high", "integer")]),
    Row("best_of", [1, 2, 20], [(21, "at most 20|21"), (0, "at least n (1)|0")], {"temperature": 1}),
    Row("suffix", [None, ""], [("end", "not supported")]),
    Row("stream_options", [None], [({"include_usage": True}, "stream=true")]),
    Row(
        "stream_options",
        [None, {}, {"include_usage": True, "continuous_usage_stats": True}],
        [({"include_usage": "x"}, "boolean"), (5, "")],
        {"stream": True},
    ),
]


def named(row: Row) -> str:
    return f"{row.name} with {', '.join(row.others)}" if row.others else row.name


@pytest.mark.parametrize("row", TABLE, ids=named)
async def test_the_bounds_are_where_the_table_says(frontend: Running, row: Row) -> None:
    base = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2} | row.others
    if row.name == "truncate_prompt_tokens":
        del base["max_tokens"]  # 16
    for value in row.good:
        response = await frontend.post("/v1/completions", base | {row.name: value})
        assert response.status_code == 200, (value, response.text)
    for value, needed in row.bad:
        response = await frontend.post("/v1/completions", base | {row.name: value})
        assert response.status_code == 400, (value, response.text)
        error = response.json()["error"]
        assert error["param"] == row.name, (value, error)
        assert row.name in error["message"], (value, error)
        parts = needed.split("|")
        # Where two wordings of a bound are named, one of them will do.
        missing = [part for part in parts if part not in error["message"]]
        assert len(missing) <= (1 if len(parts) > 2 else 0), (value, error, missing)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"],
)
async def test_numbers_must_be_finite(frontend: Running, name: str, text: str) -> None:
    value = f'{{"5": {text}}}' if name == "logit_bias" else text
    raw = f'{{"model": "{MODEL}", "prompt": [5], "{name}": {value}}}'
    response = await frontend.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_values_reach_the_engine_within_their_bounds(frontend: Running) -> None:
    await frontend.complete(max_tokens=1, temperature=0.005, logit_bias={"5": 1000, "6": -1000})
    params = frontend.fake.submits[-1].sampling_params
    assert params.temperature == pytest.approx(0.01)
    assert dict(params.logit_bias) == {5: 100.0, 6: -100.0}
    await frontend.complete(max_tokens=1, temperature=1e-6, top_p=0.5, top_k=5, min_p=0.5)
    params = frontend.fake.submits[-1].sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 1, 0, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"vllm_xargs": {"a": 2**63}}, "vllm_xargs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"bad_words": LONG}, "bad_words"),
    ],
)
async def test_conversations_have_the_same_bounds(frontend: Running, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    response = await frontend.post("/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert param in response.json()["error"]["message"]
