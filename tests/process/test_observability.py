"""What a real stack tells: JSON logs, one trace over its services, metrics of each of them, channelz."""

import json
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from pagoda_common.process.children import free_port
from tests.fakes.fake_collector import FakeCollector
from tests.process.stack import Stack, poll_until

QUESTION = "What is the colour of xylophone-7319?"


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {"scheduler": free_port(), "worker": free_port()}


@pytest.fixture(scope="module")
def collector() -> Iterator[FakeCollector]:
    with FakeCollector() as running:
        yield running


@pytest.fixture(scope="module")
def stack(ports: dict[str, int], collector: FakeCollector) -> Iterator[Stack]:
    metrics = [f"--{name}-metrics-port={port}" for name, port in ports.items()]
    traces = [f"--otlp-traces-endpoint={collector.url}", "--collect-detailed-traces=all"]
    flags = ["--log-format=json", "--enable-channelz", "--enable-log-requests", "--api-key=k-5521"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        running = Stack(*metrics, *traces, *flags, "--max-num-batched-tokens=16")
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()


def chat(stack: Stack, request_id: str, traceparent: str = "", question: str = QUESTION) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k-5521", "X-Request-Id": request_id}
    if traceparent:
        headers["traceparent"] = traceparent
    request = urllib.request.Request(f"{stack.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as response:
        assert response.headers["X-Request-Id"] == request_id


def test_every_line_is_an_object_and_a_request_can_be_found(stack: Stack) -> None:
    chat(stack, "find-me-1")
    poll_until(lambda: "/v1/chat/completions 200" in stack.log, what="the access line", log=lambda: stack.log)
    logs = [json.loads(line) for line in stack.log.splitlines() if not line.startswith(("\n", " ")) and line[:1] == "{"]
    others = [line for line in stack.log.splitlines() if line[:1] != "{"]
    assert not [line for line in others if "INFO" in line or "WARNING" in line], others
    assert {"frontend", "scheduler", "worker"} <= {one["service"] for one in logs}
    own = [one for one in logs if one.get("request_id") == "find-me-1"]
    assert any(one.get("path") == "/v1/chat/completions" and one["status"] == 200 for one in own)
    assert any(one["message"].startswith("received request chatcmpl-find-me-1") for one in own)


def test_no_key_and_no_prompt_is_in_the_log(stack: Stack) -> None:
    chat(stack, "secret-1")
    poll_until(lambda: '"secret-1"' in stack.log, what="the access line", log=lambda: stack.log)
    assert "k-5521" not in stack.log
    assert "xylophone" not in stack.log


@pytest.mark.parametrize(
    ("service", "names"),
    [
        ("scheduler", ("vllm:num_requests_running", "pagoda:group_info", "pagoda:step_seconds_bucket")),
        ("worker", ("pagoda:worker_step_seconds_bucket", 'pagoda:worker_info{model="pagoda-tiny",state="serving"}')),
    ],
)
def test_each_service_has_metrics(stack: Stack, ports: dict[str, int], service: str, names: tuple[str, ...]) -> None:
    chat(stack, "metrics-1")
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[service]}/metrics", timeout=240) as response:
        text = response.read().decode()
    for name in (*names, "process_resident_memory_bytes"):
        assert name in text


def test_channelz_shows_servers(stack: Stack) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        key = (("authorization", "Bearer k-5521"),)
        answer = stub.GetServers(channelz_pb2.GetServersRequest(), timeout=240, metadata=key)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):  # it tells addresses of clients
            stub.GetServers(channelz_pb2.GetServersRequest(), timeout=240)
    assert answer.server


def test_a_request_is_one_trace_over_frontend_scheduler_and_worker(stack: Stack, collector: FakeCollector) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    question = " ".join(f"number {number}" for number in range(30))
    chat(stack, "traced-1", f"00-{trace_id}-00f067aa0ba902b7-01", question)

    def names() -> list[str]:
        return [span.name for span in collector.spans(trace_id)]

    wanted = {"POST /v1/chat/completions", "llm_request", "engine_request", "submit", "queue", "prefill", "worker"}
    wanted |= {"decode", "deliver"}
    poll_until(lambda: wanted <= set(names()), what="all spans have come", log=lambda: f"{names()}\n{stack.log}")
    spans = collector.spans(trace_id)
    by_id = {span.span_id: span for span in spans}
    above = {span.name: by_id[span.parent_id].name for span in spans if span.parent_id in by_id}
    assert above == {
        "llm_request": "POST /v1/chat/completions",
        "deliver": "llm_request",
        "engine_request": "llm_request",
        "submit": "engine_request",
        "queue": "engine_request",
        "prefill": "engine_request",
        "worker": "prefill",
        "decode": "engine_request",
    }
    assert {span.service for span in spans} == {"pagoda-frontend", "pagoda-scheduler"}
    (engine,) = (span for span in spans if span.name == "engine_request")
    chunks = [span for span in spans if span.name == "prefill"]
    assert len(chunks) > 1, "a prompt of more than 16 tokens takes more than one step"
    num_computed = engine.attributes["gen_ai.usage.prompt_tokens"] - engine.attributes["pagoda.usage.cached_tokens"]
    assert sum(span.attributes["pagoda.num_tokens"] for span in chunks) == num_computed
    for span in spans:
        if span.parent_id == engine.span_id:
            assert engine.start_ns <= span.start_ns <= span.end_ns <= engine.end_ns
    poll_until(lambda: trace_id in stack.log, what="the trace's id in the log", log=lambda: stack.log)


def test_what_the_caller_does_not_sample_leaves_no_span(stack: Stack, collector: FakeCollector) -> None:
    trace_id = "5bf92f3577b34da6a3ce929d0e0e4736"
    chat(stack, "untraced-1", f"00-{trace_id}-00f067aa0ba902b7-00")
    chat(stack, "traced-2", f"00-{trace_id.replace('5', '6')}-00f067aa0ba902b7-01")
    later = trace_id.replace("5", "6")
    poll_until(lambda: any(span.name == "decode" for span in collector.spans(later)), what="spans of what came later")
    assert collector.spans(trace_id) == []
