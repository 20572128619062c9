"""Who may call: bearer keys on the API's prefixes, as a thin layer around the app."""

import hmac

import orjson
from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

GUARDED_PREFIXES = ("/v1", "/v2", "/inference")
"""vLLM's; what probes and scrapers need stays open."""


class RequireApiKey:
    """Refuses calls of the API without one of the keys: 401, with vLLM's body."""

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not self._is_allowed(scope):
            refusal = Response(orjson.dumps({"error": "Unauthorized"}), 401, media_type="application/json")
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not path.startswith(GUARDED_PREFIXES):
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Every key is compared, in constant time: neither length nor order of the keys leaks.
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)
