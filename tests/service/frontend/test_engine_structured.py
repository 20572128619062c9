"""Structured outputs from the embedded model behind a frontend: 240 schemas, every output is a valid document."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from pagoda_common.config import CacheConfig, EngineConfig
from tests.fakes.fake_scheduler import FakeScheduler
from tests.harness.engine import running_worker
from tests.harness.scheduler import running_scheduler
from tests.json_schemas import Schema, make_schemas
from tests.service.frontend.harness import MODEL, Running, frontend_at, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMAS = make_schemas(240)
MAX_TOKENS = 600


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Running]:
    # Room for some 60 of the outputs: the others wait, and some are preempted on their way.
    config = EngineConfig(cache=CacheConfig(num_blocks_override=200))
    async with (
        running_scheduler(config) as scheduler,
        running_worker(scheduler.address),
        frontend_at(scheduler.address, FakeScheduler()) as running,
    ):
        await until(lambda: running.server.serving.is_ready, timeout_s=120)
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
        "response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": schema, "strict": True}},
    }


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


async def test_every_output_is_a_valid_document_of_its_schema(engine: Running) -> None:
    bodies = [body_of(number, schema) for number, schema in enumerate(SCHEMAS)]
    answers = await asyncio.gather(*(whole(engine, body) for body in bodies))
    for schema, (text, finish_reason) in zip(SCHEMAS, answers, strict=True):
        assert finish_reason == "stop", (schema, text)
        validator = jsonschema.Draft202012Validator
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
    assert Counter(reason for _, reason in answers) == {"stop": len(SCHEMAS)}
    assert engine.server.serving.engine.load.num_preemptions > 0
    # What is streamed beside others, in other batches, is the same text.
    some = range(0, len(SCHEMAS), 4)
    again = await asyncio.gather(*(streamed(engine, bodies[number]) for number in some))
    assert again == [answers[number] for number in some]
