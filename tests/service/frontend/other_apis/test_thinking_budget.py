"""A bound on reasoning is taken by every API, under the name that it has there."""

from typing import Any

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_frontend.reasoning_parsers import TaggedReasoningParser, register_reasoning_parser
from tests.service.frontend.harness import MODEL, Running, running_frontend

BUDGET = "thinking_token_budget"
MESSAGES = [{"role": "user", "content": "hello"}]
MESSAGE_BODY = {"messages": MESSAGES, "max_tokens": 4}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**MESSAGE_BODY, BUDGET: 5}),
    ("/v1/completions", {"prompt": ["hello", "good bye"], "max_tokens": 4, BUDGET: 5}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 4, BUDGET: 5}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 16, BUDGET: 5}),
    ("/v1/messages", {**MESSAGE_BODY, BUDGET: 5, "thinking": {"type": "enabled", "budget_tokens": 4000}}),
    ("/v1/messages", {**MESSAGE_BODY, "thinking": {"type": "enabled", "budget_tokens": 5}}),
]


@register_reasoning_parser("brackets")
class Brackets(TaggedReasoningParser):
    """Reasoning between markers that are tokens of the embedded model."""

    start, end = "[", "]"


def grammar_of(frontend: Running) -> str:
    return frontend.fake.submits[-1].sampling_params.structured_output.grammar


@pytest.mark.parametrize("place", range(len(BODIES)))
async def test_the_budget_reaches_the_engine(place: int) -> None:
    path, body = BODIES[place]
    async with running_frontend(reasoning_parser="brackets") as frontend:
        response = await frontend.post(path, {"model": MODEL, **body})
        assert response.status_code == 200, response.text
        assert "{0,5}" in grammar_of(frontend)
        name = "thinking" if path == "/v1/messages" and BUDGET not in body else BUDGET
        value: Any = {"type": "enabled", "budget_tokens": -2} if name == "thinking" else -2
        refused = await frontend.post(path, {"model": MODEL, **body, name: value})
        assert refused.status_code == 400
        assert "must be at least 0, or -1 for no bound, got -2" in refused.text


async def test_the_budget_of_a_grpc_chat_reaches_the_engine() -> None:
    async with running_frontend(reasoning_parser="brackets") as frontend:
        stub: Any = inference_pb2_grpc.InferenceStub(frontend.channel)
        asked = [inference_pb2.ChatMessage(role="user", content="hello")]
        await stub.ChatUnary(inference_pb2.ChatRequest(messages=asked, thinking_token_budget=5))
        assert "{0,5}" in grammar_of(frontend)
        with pytest.raises(grpc.aio.AioRpcError, match="must be at least 0"):
            await stub.ChatUnary(inference_pb2.ChatRequest(messages=asked, thinking_token_budget=-2))


async def test_a_budget_that_cannot_be_held_is_refused_but_for_anthropics_which_is_a_wish(frontend: Running) -> None:
    for path, body in BODIES:
        response = await frontend.post(path, {"model": MODEL, **body})
        is_wish = BUDGET not in body
        assert response.status_code == (200 if is_wish else 400), (path, response.text)
        assert is_wish or "--reasoning-parser" in response.text
    assert not frontend.fake.submits[-1].sampling_params.HasField("structured_output")


async def test_prompts_of_one_completion_have_all_begun_to_reason_or_none() -> None:
    async with running_frontend(reasoning_parser="brackets") as frontend:
        body = {"model": MODEL, "prompt": ["hello", "hello ["], "max_tokens": 4, BUDGET: 5}
        refused = await frontend.post("/v1/completions", body)
        assert refused.status_code == 400
        assert "prompts that all end inside reasoning" in refused.text
