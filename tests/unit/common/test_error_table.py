"""Errors: their codes, and how each code looks over HTTP."""

import pytest

from pagoda_common import errors
from pagoda_common.errors import HTTP_ERRORS, Code, PagodaError, ShareFull

TABLE = {
    Code.CANCELLED: (499, "RequestCancelledError"),
    Code.INVALID_ARGUMENT: (400, "BadRequestError"),
    Code.DEADLINE_EXCEEDED: (504, "TimeoutError"),
    Code.NOT_FOUND: (404, "NotFoundError"),
    Code.PERMISSION_DENIED: (403, "PermissionDeniedError"),
    Code.RESOURCE_EXHAUSTED: (503, "ServiceUnavailableError"),
    Code.FAILED_PRECONDITION: (409, "Conflict"),
    Code.ABORTED: (409, "Conflict"),
    Code.UNIMPLEMENTED: (501, "NotImplementedError"),
    Code.INTERNAL: (500, "InternalServerError"),
    Code.UNAVAILABLE: (503, "ServiceUnavailableError"),
    Code.UNAUTHENTICATED: (401, "Unauthorized"),
}
CLASSES = {
    "PagodaError": Code.INTERNAL,
    "InvalidRequest": Code.INVALID_ARGUMENT,
    "ConfigError": Code.INVALID_ARGUMENT,
    "RequestTooLong": Code.INVALID_ARGUMENT,
    "NotFound": Code.NOT_FOUND,
    "QueueFull": Code.RESOURCE_EXHAUSTED,
    "ShareFull": Code.RESOURCE_EXHAUSTED,
    "NotReady": Code.UNAVAILABLE,
    "StaleEpoch": Code.FAILED_PRECONDITION,
    "Superseded": Code.ABORTED,
    "DeadlineExceeded": Code.DEADLINE_EXCEEDED,
    "RequestFailed": Code.INTERNAL,
    "ModelLoadError": Code.FAILED_PRECONDITION,
    "OutOfMemory": Code.RESOURCE_EXHAUSTED,
}


def test_the_codes_are_those_of_grpc() -> None:
    import grpc

    assert {code.name: code.value for code in Code} == {
        code.name: code.value[0] for code in grpc.StatusCode if code.name in Code.__members__
    }
    assert len(Code) == 13


def test_each_code_looks_like_this_over_http() -> None:
    assert {code: (int(shown.status), shown.type) for code, shown in HTTP_ERRORS.items()} == TABLE


@pytest.mark.parametrize("name", CLASSES)
def test_an_error_has_its_code(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("what", field="f", retry_after_s=2.5)
    assert (str(error), error.message, error.field, error.retry_after_s) == ("what", "what", "f", 2.5)
    assert error.code is CLASSES[name]
    status = (429, "RateLimitError") if name == "ShareFull" else TABLE[CLASSES[name]]
    assert (int(error.http.status), error.http.type) == status
    plain = kind("what")
    assert (plain.field, plain.retry_after_s) == (None, 0.0)


def test_no_error_is_left_out() -> None:
    found = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PagodaError)}
    assert found == set(CLASSES)


def test_a_code_may_be_given_and_an_unknown_one_is_internal() -> None:
    assert PagodaError("a", code=Code.ABORTED).code is Code.ABORTED
    assert PagodaError("a", code=Code.OK).http.status == 500
    assert PagodaError("a").code is Code.INTERNAL
    assert ShareFull.FIELD == "client"
    assert issubclass(errors.InvalidRequest, ValueError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(ShareFull, errors.QueueFull)
