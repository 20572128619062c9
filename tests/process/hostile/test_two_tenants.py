"""`pagoda serve` with two API keys behind one proxy, and an operator: what each may do, and what the logs show."""

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from tests.process.stack import Stack, poll_until

A, B, OPERATOR = "key-of-tenant-a", "key-of-tenant-b", "key-of-the-operator"
PROXY = ("Authorization", "Basic cHJveHk6c2VjcmV0")
MESSAGES = "/v1/messages"
BODY: dict[str, Any] = {"max_tokens": 300, "messages": [{"role": "user", "content": "Tell me a story about a dog."}]}
FORGED = "mine\nERROR 00:00:00.000 scheduler: forged\x1b[2J"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PAGODA_API_KEY", f"{A},{B}")
    patch.setenv("PAGODA_OPERATOR_KEY", OPERATOR)
    stack = Stack("--enable-sleep-mode", "--enable-log-requests")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()
        patch.undo()


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=240) as client:
        yield client


def shown(key: str) -> list[tuple[str, str]]:
    return [PROXY, ("x-api-key", key)]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_stream_is_resumed_by_its_own_tenant_alone(http: httpx.Client) -> None:
    body = {**BODY, "stream": True}
    with http.stream("POST", MESSAGES, json=body, headers=shown(A)) as stream:
        lines = stream.iter_lines()
        place = ("Last-Event-ID", next(line for line in lines if line.startswith("id: ")).removeprefix("id: "))
        assert http.post(MESSAGES, json=body, headers=[*shown(B), place]).status_code == 404
        assert http.post(MESSAGES, json=body, headers=[*shown("junk"), place]).status_code == 401
        with http.stream("POST", MESSAGES, json=body, headers=[*shown(A), place]) as resumed:
            assert resumed.status_code == 200


def test_what_one_has_cached_the_other_does_not_find(http: httpx.Client) -> None:
    def num_cached(key: str) -> int:
        answer = http.post(MESSAGES, json={**BODY, "max_tokens": 2, "system": "Be brief."}, headers=shown(key)).json()
        return int(answer["usage"]["cache_read_input_tokens"])

    num_cached(A)
    assert num_cached(A) > 0
    assert num_cached(B) == 0
    assert num_cached(B) > 0


def test_only_the_operator_does_what_concerns_all(http: httpx.Client) -> None:
    for path, body in (("/sleep?mode=abort", None), ("/wake_up", None), ("/reload_weights", {"model": "/etc"})):
        assert http.post(path, json=body).status_code in (400, 401)
        assert http.post(path, headers=bearer(A), json=body).status_code == 403
    refusals = {
        http.post("/reload_weights", headers=bearer(OPERATOR), json={"model": path}).text.replace(path, "PATH")
        for path in ("/etc", "/no/such/path")
    }
    assert len(refusals) == 1, "what exists is not told"
    assert "must be the served model" in refusals.pop()
    assert http.post("/sleep", headers=bearer(OPERATOR)).status_code == 200
    assert http.post("/wake_up", headers=bearer(OPERATOR)).status_code == 200
    assert http.post("/v1/completions", headers=bearer(OPERATOR), json={"prompt": "x"}).status_code == 401


def test_logs_show_neither_keys_nor_queries_nor_forged_lines(stack: Stack, http: httpx.Client) -> None:
    http.get("/v1/models?api_key=a-key-in-a-query", headers=bearer(A))
    request = inference_pb2.GenerateRequest(text="x", request_id=FORGED)
    request.sampling_params.max_tokens = 1
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stub.GenerateUnary(request, timeout=240, metadata=(("authorization", f"Bearer {A}"),))
    poll_until(lambda: "forged" in stack.log, what="the request is logged")
    assert r"mine\nERROR 00:00:00.000 scheduler: forged\x1b[2J" in stack.log
    assert "\x1b" not in stack.log
    assert "GET /v1/models HTTP" in stack.log
    for secret in ("a-key-in-a-query", A, B, OPERATOR):
        assert secret not in stack.log
