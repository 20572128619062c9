"""On whose behalf a call comes, how urgent it is and how long it may take: from its headers and its body."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.openai.protocol import EmbeddingBody, GenerationBody

INT64 = range(-(2**63), 2**63)
MAX_TENANT_CHARS = 128
DIGEST_CHARS = 16
TENANT_HEADER = "x-tenant-id"
PRIORITY_HEADER = "x-vllm-priority"
TIMEOUT_HEADER = "x-request-timeout"
"""Pagoda's own, as the body's field `timeout`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What the scheduler is told about a call besides prompt and parameters."""

    tenant: str = ""
    """Who is served; policy fair shares between tenants."""
    priority: int = 0
    """Lower runs first."""
    timeout_s: float = 0.0
    """Seconds after which the call has failed; 0 is never."""


def terms_of(headers: Mapping[str, str], body: GenerationBody | EmbeddingBody, *, has_api_keys: bool) -> Terms:
    """The terms of a call over HTTP. A header goes before the field of the body.

    Raises:
        InvalidRequest: a value cannot be read or is out of its bounds; `field` names it.
    """
    priority = _integer(headers[PRIORITY_HEADER]) if PRIORITY_HEADER in headers else body.priority
    if priority is not None and priority not in INT64:
        raise InvalidRequest(f"priority must fit 64 bits, got {priority}", field="priority")
    timeout_s = _seconds(headers[TIMEOUT_HEADER]) if TIMEOUT_HEADER in headers else body.timeout
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InvalidRequest(f"timeout must be greater than 0 seconds, got {timeout_s:g}", field="timeout")
    return Terms(
        tenant=tenant_of(headers, has_api_keys=has_api_keys), priority=priority or 0, timeout_s=timeout_s or 0.0
    )


def tenant_of(headers: Mapping[str, str], *, has_api_keys: bool) -> str:
    """A digest of the API key; without keys what the caller says of itself, who may say anything then."""
    if not has_api_keys:
        return headers.get(TENANT_HEADER, "")[:MAX_TENANT_CHARS]
    key = headers.get("authorization", "").partition(" ")[2].strip() or headers.get("x-api-key", "").strip()
    return hashlib.sha256(key.encode()).hexdigest()[:DIGEST_CHARS] if key else ""


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
