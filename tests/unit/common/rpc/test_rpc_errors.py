"""What a peer's refusal becomes on our side."""

import grpc
import grpc.aio
import pytest

from pagoda_common.errors import Code, NotFound
from pagoda_common.rpc.service import ErrorInterceptor, error_from_rpc, error_status


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, Code.FAILED_PRECONDITION),
        (grpc.StatusCode.UNAVAILABLE, Code.UNAVAILABLE),
        (grpc.StatusCode.UNKNOWN, Code.INTERNAL),
    ],
)
def test_the_code_and_words_of_an_asyncio_call_are_kept(status: grpc.StatusCode, code: Code) -> None:
    metadata = grpc.aio.Metadata()
    error = error_from_rpc(grpc.aio.AioRpcError(status, metadata, metadata, details="step 5 is expected"))
    assert (error.code, error.message) == (code, "step 5 is expected")


def test_an_error_without_a_status_is_internal() -> None:
    error = error_from_rpc(grpc.RpcError("odd"))
    assert (error.code, error.message) == (Code.INTERNAL, "odd")


@pytest.mark.parametrize("letter", ["a", "ä", "本"])
async def test_a_long_message_arrives_with_its_code_its_beginning_and_its_end(letter: str) -> None:
    message = f"the adapter {letter * 50_000!r} does not exist"

    async def fail(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        raise NotFound(message, field="lora_name")

    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    handlers = {"Fail": grpc.unary_unary_rpc_method_handler(fail)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/test.Test/Fail")(b"", timeout=60)
    finally:
        await server.stop(None)
    error = error_from_rpc(caught.value)
    assert error.code is Code.NOT_FOUND
    assert error.message.startswith(f"the adapter '{letter * 200}")
    assert error.message.endswith(f"{letter * 200}' does not exist")


def test_a_message_that_fits_is_kept_as_it_is() -> None:
    message = "ä" * 650
    assert error_status(NotFound(message)).message == message
