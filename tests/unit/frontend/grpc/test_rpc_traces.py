"""A span for each call over gRPC: its name, its parent, its attributes, and its end with the call."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from pagoda_common.metrics.tracing import Tracer, current_span
from pagoda_common.process.logging import trace_id
from pagoda_frontend.grpc.traces import TraceRpc

SERVICE = "pagoda.v1.Inference"
METHOD = f"/{SERVICE}/Generate"


class Spans:
    """A tracer that notes what begins."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, dict[str, Any]]] = []
        self.num_ended = 0

    def start(self, name: str, **given: Any) -> Any:
        self.begun.append((name, given))
        return SimpleNamespace(trace_id="the-trace", end=self._end)

    def _end(self) -> None:
        self.num_ended += 1


class Context:
    """Of a call that the test ends."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


async def wrapped(spans: Spans, handler: Any, method: str = METHOD, metadata: Any = ()) -> Any:
    details = cast("Any", SimpleNamespace(method=method, invocation_metadata=metadata))

    async def continuation(given: Any) -> Any:
        assert given is details
        return handler

    return await TraceRpc(service=SERVICE, tracer=cast("Tracer", spans)).intercept_service(continuation, details)


def expected(traceparent: str = "", tracestate: str = "") -> tuple[str, dict[str, Any]]:
    attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": "Generate"}
    given = {"kind": "server", "traceparent": traceparent, "tracestate": tracestate, "attributes": attributes}
    return f"{SERVICE}/Generate", given


def decode(data: bytes) -> str:
    return data.decode()


def encode(text: str) -> bytes:
    return text.encode()


async def test_a_call_with_one_answer() -> None:
    spans, context = Spans(), Context()

    async def behaviour(request: Any, given: Any) -> str:
        assert given is context
        assert (current_span.get() is not None, trace_id.get()) == (True, "the-trace")
        return f"answer to {request}"

    given = grpc.unary_unary_rpc_method_handler(behaviour, request_deserializer=decode, response_serializer=encode)
    pairs = (("traceparent", "p"), ("tracestate", "s"), ("x-bin", b"traceparent"), ("traceparent-bin", b"q"))
    handler = await wrapped(spans, given, metadata=pairs)
    assert (handler.request_deserializer, handler.response_serializer) == (decode, encode)
    assert not handler.response_streaming
    assert spans.begun == []
    assert await handler.unary_unary("a", context) == "answer to a"
    assert spans.begun == [expected("p", "s")]
    assert spans.num_ended == 0
    [callback] = context.callbacks
    callback(context)
    assert spans.num_ended == 1


async def test_a_stream_is_closed_with_the_one_that_reads_it() -> None:
    spans, context, ends = Spans(), Context(), []

    async def behaviour(request: Any, given: Any) -> AsyncIterator[str]:
        try:
            for number in range(3):
                yield f"{request}{number}"
        finally:
            ends.append("closed")

    given = grpc.unary_stream_rpc_method_handler(behaviour, request_deserializer=decode, response_serializer=encode)
    handler = await wrapped(spans, given)
    assert (handler.request_deserializer, handler.response_serializer) == (decode, encode)
    assert [answer async for answer in handler.unary_stream("a", context)] == ["a0", "a1", "a2"]
    assert (spans.begun, ends) == ([expected()], ["closed"])
    stream = handler.unary_stream("b", context)
    assert await anext(stream) == "b0"
    await stream.aclose()
    assert ends == ["closed", "closed"]
    assert len(context.callbacks) == 2


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/pagoda.v1.InferenceX/Generate"])
async def test_calls_of_other_services_are_left_as_they_are(method: str) -> None:
    handler = object()
    assert await wrapped(Spans(), handler, method) is handler
    assert await wrapped(Spans(), None) is None
