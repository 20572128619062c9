"""What a peer's refusal becomes on our side."""

import grpc
import grpc.aio
import pytest

from pagoda_common.errors import Code
from pagoda_common.rpc.service import error_from_rpc


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
