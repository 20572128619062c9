"""The OpenAPI document is right: whatever it allows is answered as it says, and never with a server error."""

import asyncio
import threading
from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fakes.fake_scheduler import FakeScheduler
from tests.service.frontend.harness import running_frontend

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_EXAMPLES = 4
WITHOUT_BODY = ("/cancel", "/ping", "/invocations")
"""Paths that are posted to without a body, or with one of several kinds."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A frontend on a thread of its own: schemathesis calls it as a client that blocks."""
    started, ended = threading.Event(), asyncio.Event()
    found: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with running_frontend(FakeScheduler(step_s=0.0001), enable_tokenizer_info_endpoint=True) as running:
            found.append(str(running.http.base_url))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(240)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(240)
        loop.close()


@pytest.fixture(scope="module")
def schema(url: str) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def _operations(schema: BaseSchema) -> list[APIOperation]:
    return [result.ok() for result in schema.get_all_operations()]


def test_the_document_is_valid_and_complete(schema: BaseSchema) -> None:
    schema.validate()
    operations = {operation.label: operation for operation in _operations(schema)}
    assert {"POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages"} <= set(
        operations
    )
    for label, operation in operations.items():
        raw = operation.definition.raw
        assert "422" not in raw["responses"], label
        has_body = label.startswith("POST ") and not label.endswith(WITHOUT_BODY)
        assert ("requestBody" in raw) == has_body, label
    chat = schema.raw_schema["components"]["schemas"]["ChatBody"]
    assert "messages" in chat["required"]


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_what_the_document_allows_is_answered_as_it_says(schema: BaseSchema, url: str, mode: GenerationMode) -> None:
    for operation in _operations(schema):
        if mode is GenerationMode.NEGATIVE and "requestBody" not in operation.definition.raw:
            continue

        @hypothesis.settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Case) -> None:
            response = case.call(base_url=url, timeout=240)
            case.validate_response(response, checks=CHECKS)

        check()
