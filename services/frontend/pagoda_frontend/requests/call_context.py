"""CallContext: who makes an API call, its priority, time limit and id, and the stream that it resumes."""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from pagoda_common.metrics.tracing import Span, current_span
from pagoda_frontend.requests.resume import Resumption, note_of

MAX_REQUEST_ID_CHARS = 128
MAX_TENANT_CHARS = 128
TENANT_HEADER = "x-tenant-id"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallContext:
    """Context of a whole call, from its handler to the engine's requests. Made by `begin_call`."""

    request_id: str
    """The client's id of the call."""
    engine_id: str
    """Id of its request in the engine: unique, and the same at a frontend that resumes it. If a call has several
    requests, a number is appended to each."""
    created: int
    """Unix time in seconds; for a resumed call, the arrival of the first attempt."""
    tenant: str = ""
    """Owner of the call; policy fair divides time between tenants."""
    priority: int = 0
    """Lower runs first."""
    timeout_s: float = 0.0
    """Seconds after which the call has failed; 0 is never."""
    span: Span | None = None
    """Span of the call; None if calls are not traced."""
    note: bytes = b""
    """Key by which another frontend can resume this call's stream; empty: it cannot be resumed."""
    resumption: Resumption | None = None
    """The stream that this call resumes."""

    def noting(self, body: BaseModel | str, *, path: str, **more: Any) -> "CallContext":
        """This call, with a stream that another frontend may resume; arguments as in `note_of`."""
        return replace(self, note=note_of(body, path=path, created=self.created, **more))

    def part(self, place: int) -> "CallContext":
        """The call of one of several conversations."""
        request_id = f"{self.request_id}-{place}"
        return replace(self, request_id=request_id, engine_id=_engine_id(request_id))


def begin_call(
    request_id: str,
    *,
    created: int,
    tenant: str = "",
    priority: int = 0,
    timeout_s: float = 0.0,
    resumption: Resumption | None = None,
) -> CallContext:
    """A new call, or the one that `resumption` resumes, with that call's ids and time."""
    if resumption is not None:
        request_id, created = resumption.response_id, resumption.created
    return CallContext(
        request_id=request_id,
        engine_id=_engine_id(request_id) if resumption is None else resumption.adopted[0].request_id,
        created=created,
        tenant=tenant,
        priority=priority,
        timeout_s=timeout_s,
        span=current_span.get(),
        resumption=resumption,
    )


def claimed_tenant(headers: Mapping[str, str]) -> str:
    """The tenant that a caller of a server without keys names in `headers` (names in lower case)."""
    return headers.get(TENANT_HEADER, "")[:MAX_TENANT_CHARS]


def unique_id(prefix: str, suffix: str | None = None) -> str:
    """A request id: `prefix` and the client's id, else a random one."""
    if suffix:
        return prefix + re.sub(r"[^A-Za-z0-9_.:-]", "_", suffix[:MAX_REQUEST_ID_CHARS])
    return prefix + uuid.uuid4().hex


def _engine_id(request_id: str) -> str:
    return f"{request_id}-{uuid.uuid4().hex[:8]}"
