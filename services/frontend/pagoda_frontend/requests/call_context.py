"""One call of the API, whatever it asks: who calls, how urgently, for how long, under which id, and what it resumes."""

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
    """What its request is called in the engine: unique, and the same at a frontend that resumes it. Where a call has
    several, each has its number after it."""
    created: int
    """Unix time in seconds; of a call that is resumed, when it first came."""
    tenant: str = ""
    """Owner of the call; policy fair divides time between tenants."""
    priority: int = 0
    """Lower runs first."""
    timeout_s: float = 0.0
    """Seconds after which the call has failed; 0 is never."""
    span: Span | None = None
    """Span of the call; None if calls are not traced."""
    note: bytes = b""
    """For a frontend that resumes this call's stream when this one is gone; empty: none may."""
    resumption: Resumption | None = None
    """The stream that this call resumes."""

    def noting(self, body: BaseModel | str, *, path: str, **more: Any) -> "CallContext":
        """This call as one whose stream another frontend may resume; arguments as in `note_of`."""
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
    """A new call, or the one that `resumption` resumes: then under its ids, and made when it was made."""
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
    """Whom a caller of a server without keys says to be, in `headers` (names in small letters)."""
    return headers.get(TENANT_HEADER, "")[:MAX_TENANT_CHARS]


def unique_id(prefix: str, suffix: str | None = None) -> str:
    """A request id: `prefix` and what the client gave, else something random."""
    if suffix:
        return prefix + re.sub(r"[^A-Za-z0-9_.:-]", "_", suffix[:MAX_REQUEST_ID_CHARS])
    return prefix + uuid.uuid4().hex


def _engine_id(request_id: str) -> str:
    return f"{request_id}-{uuid.uuid4().hex[:8]}"
