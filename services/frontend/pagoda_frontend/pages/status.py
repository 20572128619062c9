"""The status page at /: its files, and the headers that keep a browser from loading or sending anything elsewhere."""

from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI, Request, Response

FOLDER = Path(__file__).parent / "status_page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status/page.css": ("page.css", "text/css; charset=utf-8"),
    "/status/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/status/figures.js": ("figures.js", "text/javascript; charset=utf-8"),
    "/status/samples.js": ("samples.js", "text/javascript; charset=utf-8"),
    "/status/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/status/model.js": ("model.js", "text/javascript; charset=utf-8"),
    "/status/history.js": ("history.js", "text/javascript; charset=utf-8"),
    "/status/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
    "/status/calls.js": ("calls.js", "text/javascript; charset=utf-8"),
    "/status/tokens.js": ("tokens.js", "text/javascript; charset=utf-8"),
    "/status/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""File and media type by path. The page names its files relative to itself: a proxy may add a prefix."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_status_page(app: FastAPI) -> None:
    """Serve the page. It calls /metrics, /ready and the API like any other client, with a key that its reader types."""
    for path, (name, media_type) in FILES.items():
        app.add_route(path, serve_file((FOLDER / name).read_bytes(), media_type), include_in_schema=False)


def serve_file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """A handler that answers with `content`, or with 304 if the client already has it."""
    tag = f'"{sha256(content).hexdigest()[:16]}"'

    async def answer(request: Request) -> Response:
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return answer
