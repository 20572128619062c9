"""Structured outputs from the embedded model through a frontend: 240 schemas, every output is a valid document."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import pytest_asyncio

from pagoda_common.config.engine_config import CacheConfig, EngineConfig
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from tests.fakes.fake_scheduler import FakeScheduler
from tests.harness.engine import running_worker
from tests.harness.scheduler import running_scheduler
from tests.json_schemas import Schema, make_schemas
from tests.service.frontend.harness import MODEL, Running, frontend_at, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMAS = make_schemas(240)
MAX_TOKENS = 600
PET: Schema = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Running]:
    # Room for about 60 of the outputs: the others wait, and some are preempted on their way.
    config = EngineConfig(cache=CacheConfig(num_blocks_override=200))
    async with (
        running_scheduler(config) as scheduler,
        running_worker(scheduler.address),
        frontend_at(scheduler.address, FakeScheduler()) as running,
    ):
        await until(lambda: running.server.serving.is_ready, timeout_s=240)
        running.http.timeout = 280
        yield running


def body_of(number: int, schema: Schema) -> dict[str, Any]:
    """A request for a document; every third is drawn at random, the others are greedy."""
    return {
        "model": MODEL,
        "prompt": ("A story about a dog:", "Here is the answer: ", "{")[number % 3],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8 if number % 3 == 1 else 0,
        "seed": number,
        "response_format": json_schema(schema),
    }


def json_schema(schema: Schema) -> dict[str, Any]:
    """The response format."""
    return {"type": "json_schema", "json_schema": {"name": "d", "schema": schema, "strict": True}}


async def whole(engine: Running, body: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason."""
    response = await engine.post("/v1/completions", body)
    assert response.status_code == 200, (response.text, body)
    [choice] = response.json()["choices"]
    return choice["text"], choice["finish_reason"]


async def streamed(engine: Running, body: dict[str, Any]) -> tuple[str, str]:
    """The same, from the chunks."""
    choices = [event["choices"][0] for event in (await engine.events("/v1/completions", **body))[:-1]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def language(constraint: StructuredOutputsParams, tokenizer: Tokenizer) -> list[list[int]]:
    """Every token sequence that a constraint allows, without an end."""
    compiler = GrammarCompiler(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    found, open_ends = [], [(compiler.compile(constraint), list[int]())]
    while open_ends:
        matcher, tokens = open_ends.pop()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        for token_id in np.flatnonzero(bits).tolist():
            if token_id == compiler.end_id:
                found.append(tokens)
            elif token_id < tokenizer.vocab_size:
                longer = matcher.deep_copy()
                assert longer.consume_token(token_id)
                open_ends.append((longer, [*tokens, token_id]))
    return found


async def test_a_beam_search_finds_the_likeliest_outputs_of_a_language(engine: Running) -> None:
    regex, wanted = "no|yes|nose", 6
    model = engine.server.serving.model
    info = engine.server.engine.model_info
    assert info is not None
    words = language(StructuredOutputsParams(regex=regex), model.tokenizer)
    outputs = [[*word, end] for word in words for end in info.eos_token_ids]
    assert wanted < len(outputs) < 20  # the beams hold them all
    body = {"model": MODEL, "prompt": "It is ", "return_token_ids": True}
    scored = []
    for output in outputs:
        prompt = model.tokenizer.encode("It is ") + output
        answer = await engine.post(
            "/v1/completions", {**body, "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0}
        )
        logprobs = answer.json()["choices"][0]["logprobs"]["token_logprobs"][-len(output) :]
        scored.append((sum(logprobs) / len(output), output))
    best = [output for _, output in sorted(scored, reverse=True)][:wanted]
    search = {"use_beam_search": True, "n": wanted, "best_of": 20, "structured_outputs": {"regex": regex}}
    for _ in range(2):  # and again beside another search, in other slots
        together = await asyncio.gather(
            engine.post("/v1/completions", {**body, **search}),
            engine.post("/v1/completions", {**body, **search, "prompt": "You are ", "n": 2, "best_of": 3}),
        )
        choices, others = (answer.json()["choices"] for answer in together)
        assert [choice["token_ids"] for choice in choices] == best
        assert all(re.fullmatch(regex, choice["text"]) for choice in (*choices, *others))
        assert {choice["finish_reason"] for choice in (*choices, *others)} == {"stop"}


async def test_a_beam_search_for_more_outputs_than_there_are_fails_alone(engine: Running) -> None:
    body = {"model": MODEL, "prompt": "It is ", "use_beam_search": True, "structured_outputs": {"regex": "x"}}
    response = await engine.post("/v1/completions", {**body, "n": 3})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert response.json()["error"]["message"] == "the beam search has found 2 outputs, 3 are wanted"
    assert (await whole(engine, {**body, "n": 1})) == ("x", "stop")


async def test_documents_and_calls_may_be_searched_for(engine: Running) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "A dog!"}], "use_beam_search": True, "n": 2}
    tool = {"type": "function", "function": {"name": "feed", "parameters": PET}}
    document, call = await asyncio.gather(
        engine.post("/v1/chat/completions", {**body, "response_format": json_schema(PET)}),
        engine.post("/v1/chat/completions", {**body, "tools": [tool], "tool_choice": "required"}),
    )
    for choice in document.json()["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), PET)
    for choice in call.json()["choices"]:
        [one] = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(one["function"]["arguments"]), PET)


async def test_every_output_is_a_valid_document_of_its_schema(engine: Running) -> None:
    bodies = [body_of(number, schema) for number, schema in enumerate(SCHEMAS)]
    answers = await asyncio.gather(*(whole(engine, body) for body in bodies))
    for schema, (text, finish_reason) in zip(SCHEMAS, answers, strict=True):
        assert finish_reason == "stop", (schema, text)
        validator = jsonschema.Draft202012Validator
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
    assert Counter(reason for _, reason in answers) == {"stop": len(SCHEMAS)}
    assert engine.server.engine.load.num_preemptions > 0
    # What is streamed beside others, in other batches, is the same text.
    some = range(0, len(SCHEMAS), 4)
    again = await asyncio.gather(*(streamed(engine, bodies[number]) for number in some))
    assert again == [answers[number] for number in some]
