"""What a real stack tells: JSON logs with request ids and without prompts, metrics of each service, channelz."""

import json
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from pagoda_common.process import free_port
from tests.process.stack import Stack, poll_until

QUESTION = "What is the colour of xylophone-7319?"


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {"scheduler": free_port(), "worker": free_port()}


@pytest.fixture(scope="module")
def stack(ports: dict[str, int]) -> Iterator[Stack]:
    metrics = [f"--{name}-metrics-port={port}" for name, port in ports.items()]
    running = Stack(*metrics, "--log-format=json", "--enable-channelz", "--enable-log-requests", "--api-key=k-5521")
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()


def chat(stack: Stack, request_id: str) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k-5521", "X-Request-Id": request_id}
    request = urllib.request.Request(f"{stack.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
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
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[service]}/metrics", timeout=30) as response:
        text = response.read().decode()
    for name in (*names, "process_resident_memory_bytes"):
        assert name in text


def test_channelz_shows_servers(stack: Stack) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        key = (("authorization", "Bearer k-5521"),)
        answer = stub.GetServers(channelz_pb2.GetServersRequest(), timeout=30, metadata=key)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):  # it tells addresses of clients
            stub.GetServers(channelz_pb2.GetServersRequest(), timeout=30)
    assert answer.server
