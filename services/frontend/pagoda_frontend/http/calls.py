"""An HTTP call: its context and its body, which is sent with it or restored from the note of a resumed stream."""

import math
import time
from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, TypeVar

from fastapi import Request

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.http.body import TENANT, read_body
from pagoda_frontend.openai.protocol import RequestBody
from pagoda_frontend.requests.call_context import CallContext, begin_call, claimed_tenant
from pagoda_frontend.requests.event_ids import place_of
from pagoda_frontend.requests.resume import Resumption, resumption_at
from pagoda_frontend.serving.serving import Serving

Body = TypeVar("Body", bound=RequestBody)


class CallBody(Protocol):
    """Fields of every body that describe its call."""

    @property
    def priority(self) -> int | None:
        """Lower runs first."""

    @property
    def timeout(self) -> float | None:
        """Seconds."""


INT64 = range(-(2**63), 2**63)
PRIORITY_HEADER = "x-vllm-priority"
TIMEOUT_HEADER = "x-request-timeout"
"""Pagoda's own header; the same as the body's field `timeout`."""


def note_tenant(scope: MutableMapping[str, Any], key_id: str) -> None:
    """Note that the call of `scope` (ASGI's) has shown the key `key_id`."""
    scope[TENANT] = key_id


def tenant_of(request: Request, *, serving: Serving) -> str:
    """The caller: the accepted key; without keys the name that the caller chooses."""
    if not serving.has_api_keys:
        return claimed_tenant(request.headers)
    tenant: str = request.scope[TENANT]  # an error where a path is not guarded
    return tenant


async def read_call(
    request: Request, body_type: type[Body], *, serving: Serving, path: str
) -> tuple[Body, Resumption | None]:
    """The content of `request`: its body, or, with a Last-Event-ID, the stream to resume and the body that started it.

    Args:
        path: of the call, which must be that of the stream.

    Raises:
        PagodaError: as `read_body`, `place_of` and `resumption_at`.
    """
    place = place_of(request.headers)
    if place is None:
        return await read_body(request, body_type, serving=serving), None
    tenant = tenant_of(request, serving=serving)
    resumption = await resumption_at(place, engine=serving.engine, path=path, tenant=tenant)
    return resumption.body_as(body_type), resumption


def call_of(
    headers: Mapping[str, str],
    body: CallBody,
    *,
    tenant: str,
    request_id: str,
    resumption: Resumption | None = None,
) -> CallContext:
    """The context of a call. A header overrides the field of the body.

    Args:
        headers: names in lower case.
        tenant: the caller, as given by `tenant_of`.

    Raises:
        InvalidRequest: a value cannot be read or is out of its bounds; `field` names it.
    """
    priority = _integer(headers[PRIORITY_HEADER]) if PRIORITY_HEADER in headers else body.priority
    if priority is not None and priority not in INT64:
        raise InvalidRequest(f"priority must fit 64 bits, got {priority}", field="priority")
    timeout_s = _seconds(headers[TIMEOUT_HEADER]) if TIMEOUT_HEADER in headers else body.timeout
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InvalidRequest(f"timeout must be greater than 0 seconds, got {timeout_s:g}", field="timeout")
    return begin_call(
        request_id,
        created=int(time.time()),
        tenant=tenant,
        priority=priority or 0,
        timeout_s=timeout_s or 0.0,
        resumption=resumption,
    )


def _integer(text: str) -> int:
    try:
        return int(text[:32])
    except ValueError:
        raise InvalidRequest(f"X-Vllm-Priority must be an integer, got {text[:100]!r}", field="priority") from None


def _seconds(text: str) -> float:
    try:
        return float(text[:32])
    except ValueError:
        raise InvalidRequest(f"X-Request-Timeout must be seconds, got {text[:100]!r}", field="timeout") from None
