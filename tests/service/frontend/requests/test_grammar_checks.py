"""The process that compiles constraints, beside a gRPC server under load on the loop that the frontend has."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import uvloop

from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.requests.grammar_checks import GrammarChecks

NUM_STARTS = 150
ANSWERER = ["/bin/sh", "-c", """echo '{"is_ready": true}'; while read -r line; do echo '{"error": null}'; done"""]


class Echo(grpc.GenericRpcHandler):
    """Answers every call with its request."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self.answer)

    async def answer(self, request: bytes, context: Any) -> bytes:
        return request


async def with_grpc_traffic(run: Callable[[], Awaitable[None]]) -> None:
    """`run` while calls go to and fro."""
    server = grpc.aio.server(handlers=[Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def call_for_ever() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test/Echo")
            while True:
                await call(b"x")

    calls = [asyncio.create_task(call_for_ever()) for _ in range(8)]
    try:
        await run()
    finally:
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await server.stop(0)


def test_the_process_starts_every_time_under_grpc_traffic() -> None:
    async def start_again_and_again() -> None:
        for number in range(NUM_STARTS):
            checks = GrammarChecks(tokenizer="pagoda-tiny", revision=None, vocab_size=8)
            checks.helpers.command = ANSWERER
            await checks.check(StructuredOutputsParams(choice=[str(number)]))
            await checks.close()

    uvloop.run(with_grpc_traffic(start_again_and_again))
