"""Refuses calls that a page of another site makes through an operator's browser to a server without keys."""

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda_common.config.security_config import is_loopback
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_frontend.http.errors import error_response

READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""
OWN_PAGES = frozenset({"same-origin", "none"})
"""Accepted values of Sec-Fetch-Site: our own page, or an address that a person typed."""
FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
"""Content types that a form of any page may send to any server without asking."""


class RefuseForeignPages:
    """Refuses (403) calls from other sites' pages that change something, and Host names that may point to loopback from
    outside.

    Only servers without API keys need it: a page holds no key.
    """

    def __init__(self, app: ASGIApp, *, host: str, allowed_hosts: Sequence[str], origins: Sequence[str]) -> None:
        """
        Args:
            host: on which the server listens. On loopback, Host headers are checked against DNS rebinding.
            allowed_hosts: further names under which clients may call it; `*` is any.
            origins: whose pages may call (CORS); `*` is any.
        """
        self._app = app
        self._names = {name.lower() for name in (host, *allowed_hosts)} | {"localhost"}
        self._any_name = not is_loopback(host) or "*" in allowed_hosts
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["type"] == "http" and (message := self._refusal(Headers(scope=scope), scope["method"])):
            error = PagodaError(message, code=Code.PERMISSION_DENIED)
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, method: str) -> str | None:
        host = headers.get("host", "")
        if not self._any_name and not self._is_own(host):
            return f"Host is {host[:100]!r}, must be localhost, an IP address or one of --allowed-hosts"
        if method in READING or "*" in self._origins:
            return None
        site, origin = headers.get("sec-fetch-site", ""), headers.get("origin")
        if site in OWN_PAGES or origin in self._origins:
            return None
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return f"Origin is {origin[:100]!r}, must be this server's or one of --allowed-origins"
        return f"Sec-Fetch-Site is {site[:100]!r}, must be same-origin" if site else None

    def _is_own(self, host: str) -> bool:
        """Whether a Host header cannot be a foreign name that resolves to this server.

        Browsers always send the header. A name of one label belongs to this machine or its network: no site of the
        internet has one.
        """
        name = _without_port(host).lower().rstrip(".")
        if not name or name in self._names or name.endswith(".localhost") or not set(name) & set(".:"):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


def refuse_forms(headers: Headers) -> None:
    """Raises InvalidRequest when a call without a body may come from an HTML form."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type in FORM_TYPES:
        raise InvalidRequest(f"Content-Type must be application/json or absent, got {media_type!r}")


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
