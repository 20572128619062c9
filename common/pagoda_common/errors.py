"""The errors that a user can cause or meet, and the one table that maps them to gRPC and HTTP.

Cores raise these; the gRPC interceptor and the HTTP exception handlers translate them; any other exception is a bug.
"""

from dataclasses import dataclass
from enum import IntEnum
from http import HTTPStatus


class Code(IntEnum):
    """Canonical status codes (google.rpc.Code), without importing grpc."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class HttpError:
    """How a code looks over HTTP: the status, and the `type` of the OpenAI error object."""

    status: int
    type: str


HTTP_ERRORS: dict[Code, HttpError] = {
    Code.CANCELLED: HttpError(499, "RequestCancelledError"),
    Code.INVALID_ARGUMENT: HttpError(HTTPStatus.BAD_REQUEST, "BadRequestError"),
    Code.DEADLINE_EXCEEDED: HttpError(HTTPStatus.GATEWAY_TIMEOUT, "TimeoutError"),
    Code.NOT_FOUND: HttpError(HTTPStatus.NOT_FOUND, "NotFoundError"),
    Code.PERMISSION_DENIED: HttpError(HTTPStatus.FORBIDDEN, "PermissionDeniedError"),
    Code.RESOURCE_EXHAUSTED: HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"),
    Code.FAILED_PRECONDITION: HttpError(HTTPStatus.CONFLICT, "Conflict"),
    Code.ABORTED: HttpError(HTTPStatus.CONFLICT, "Conflict"),
    Code.UNIMPLEMENTED: HttpError(HTTPStatus.NOT_IMPLEMENTED, "NotImplementedError"),
    Code.INTERNAL: HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"),
    Code.UNAVAILABLE: HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"),
    Code.UNAUTHENTICATED: HttpError(HTTPStatus.UNAUTHORIZED, "Unauthorized"),
}
"""The table. A code that is not in it is an INTERNAL error."""


class PagodaError(Exception):
    """An error with a code, a message (what, the value, the bound) and the field at fault if there is one."""

    code: Code = Code.INTERNAL

    def __init__(
        self, message: str, *, field: str | None = None, code: Code | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code

    @property
    def http(self) -> HttpError:
        """Status and error type over HTTP."""
        return HTTP_ERRORS.get(self.code, HTTP_ERRORS[Code.INTERNAL])


class InvalidRequest(PagodaError, ValueError):
    """A parameter is wrong. `field` names it."""

    code = Code.INVALID_ARGUMENT


class ConfigError(PagodaError, ValueError):
    """A configuration value is wrong. `field` names it."""

    code = Code.INVALID_ARGUMENT


class CannotListen(OSError):
    """An address cannot be bound, often because another process has it. The message names the address."""


class RequestTooLong(InvalidRequest):
    """Prompt or output do not fit the model's context."""


class NotFound(PagodaError):
    """The name is unknown: no such model, stored answer or stream."""

    code = Code.NOT_FOUND


class QueueFull(PagodaError):
    """Too much is waiting already."""

    code = Code.RESOURCE_EXHAUSTED


class ShareFull(QueueFull):
    """One client has its share of what may wait; others are taken in."""

    FIELD = "client"
    """Names this error on the wire."""

    @property
    def http(self) -> HttpError:
        """Unlike a full queue, which is no one's fault."""
        return HttpError(HTTPStatus.TOO_MANY_REQUESTS, "RateLimitError")


class NotReady(PagodaError):
    """Starting, draining, or no worker."""

    code = Code.UNAVAILABLE


class StaleEpoch(PagodaError):
    """The message belongs to an older scheduler or worker, or to a step out of turn."""

    code = Code.FAILED_PRECONDITION


class Superseded(PagodaError):
    """A newer attempt of the same request took over."""

    code = Code.ABORTED


class DeadlineExceeded(PagodaError):
    """The request exceeded its own time limit."""

    code = Code.DEADLINE_EXCEEDED


class RequestFailed(PagodaError):
    """The engine could not compute this request; others are not affected."""

    code = Code.INTERNAL


class ModelLoadError(PagodaError):
    """The checkpoint cannot be served: a missing file, an unsupported architecture, a tensor too many or too few."""

    code = Code.FAILED_PRECONDITION


class OutOfMemory(PagodaError):
    """Not enough memory for what was asked."""

    code = Code.RESOURCE_EXHAUSTED
