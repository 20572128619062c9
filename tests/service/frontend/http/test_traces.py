"""Spans of the frontend, and what the scheduler learns of a trace."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.errors import QueueFull
from pagoda_common.metrics.tracing import sampled_traceparent, trace_id_of
from tests.fakes.fake_collector import CollectedSpan, FakeCollector
from tests.service.frontend.harness import Running, running_frontend, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    with FakeCollector() as running:
        yield running


@pytest.fixture
async def traced(collector: FakeCollector, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with running_frontend(observability=ObservabilityConfig(otlp_traces_endpoint=collector.url)) as running:
        yield running


async def spans_of(collector: FakeCollector, num: int, trace_id: str = TRACE) -> dict[str, CollectedSpan]:
    """The spans of a trace by name, as soon as there are `num`."""
    await until(lambda: len(collector.spans(trace_id)) >= num)
    return {span.name: span for span in collector.spans(trace_id)}


async def test_a_call_over_http_is_one_trace(traced: Running, collector: FakeCollector) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.5, "ignore_eos": True}
    response = await traced.post("/v1/completions", body, headers={"traceparent": PARENT})
    assert response.status_code == 200
    spans = await spans_of(collector, 3)
    http, request, deliver = spans["POST /v1/completions"], spans["llm_request"], spans["deliver"]
    assert (http.parent_id, request.parent_id, deliver.parent_id) == (
        "b7ad6b7169203331",
        http.span_id,
        request.span_id,
    )
    assert http.service == "pagoda-frontend"
    assert http.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.usage.prompt_tokens"] == 3
    assert request.attributes["gen_ai.usage.completion_tokens"] == 4
    assert request.attributes["gen_ai.request.max_tokens"] == 4
    assert request.attributes["gen_ai.request.temperature"] == 0.5
    assert request.attributes["gen_ai.latency.time_to_first_token"] > 0
    assert deliver.attributes["pagoda.outcome"] == "finished"
    assert traced.fake.submits[0].traceparent == f"00-{TRACE}-{request.span_id}-01"


async def test_a_stream_over_grpc_is_one_trace(traced: Running, collector: FakeCollector) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(traced.channel)
    request = inference_pb2.GenerateRequest(text="hello")
    request.sampling_params.max_tokens = 3
    messages = [message async for message in stub.Generate(request, metadata=(("traceparent", PARENT),))]
    assert messages
    await stub.GenerateUnary(request, metadata=(("traceparent", PARENT.replace("0af7", "1af7")),))
    spans = await spans_of(collector, 3)
    call = spans["pagoda.v1.Inference/Generate"]
    assert call.parent_id == "b7ad6b7169203331"
    assert spans["llm_request"].parent_id == call.span_id
    unary = await spans_of(collector, 3, TRACE.replace("0af7", "1af7"))
    assert set(unary) == {"pagoda.v1.Inference/GenerateUnary", "llm_request", "deliver"}


async def test_what_is_not_sampled_leaves_nothing(traced: Running, collector: FakeCollector) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    await traced.post("/v1/completions", body, headers={"traceparent": UNSAMPLED})
    assert traced.fake.submits[0].traceparent == ""
    await traced.post("/v1/completions", body)
    await until(lambda: len(collector.spans()) >= 3)  # those of the second, which came after
    assert collector.spans(TRACE) == []


async def test_a_refusal_is_an_error_in_the_trace(traced: Running, collector: FakeCollector) -> None:
    traced.fake.reject["*"] = QueueFull("max_num_queued_reqs is 1")
    body = {"model": "tiny", "prompt": [5, 6, 7]}
    response = await traced.post("/v1/completions", body, headers={"traceparent": PARENT})
    assert response.status_code == 503
    spans = await spans_of(collector, 2)
    assert spans["llm_request"].is_error
    assert spans["POST /v1/completions"].is_error


async def test_without_an_endpoint_nothing_is_made(frontend: Running) -> None:
    response = await frontend.post("/v1/completions", {"model": "tiny", "prompt": [5]}, headers={"traceparent": PARENT})
    assert response.status_code == 200
    assert frontend.server.serving.tracer is None
    assert frontend.fake.submits[0].traceparent == ""


def test_only_a_sampled_traceparent_is_taken_from_metadata() -> None:
    assert sampled_traceparent((("x", "y"), ("traceparent", PARENT))) == PARENT
    for wrong in (UNSAMPLED, "", "00-x", PARENT.upper()):
        assert sampled_traceparent((("traceparent", wrong),)) == ""
    assert sampled_traceparent(None) == ""
    assert trace_id_of(UNSAMPLED) == TRACE
    assert trace_id_of(f"00-{'0' * 32}-b7ad6b7169203331-01") == ""
