"""/docs and /redoc: FastAPI's pages about the API, with scripts served from here, so that they work offline."""

from pathlib import Path

import fastapi_offline
from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html

from pagoda_frontend.pages.status import serve_file

FOLDER = Path(fastapi_offline.__file__).parent / "static"
ASSETS = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
    "redoc.standalone.js": "text/javascript; charset=utf-8",
    "favicon.png": "image/png",
}
"""Media types of the files that the pages load."""
TITLE = "Pagoda"


def add_docs_pages(app: FastAPI) -> None:
    """Serve both pages and the files that they load; a proxy may add a prefix (root_path)."""

    async def swagger(request: Request) -> Response:
        prefix = str(request.scope.get("root_path", ""))
        return get_swagger_ui_html(
            openapi_url=f"{prefix}{app.openapi_url}",
            title=TITLE,
            swagger_js_url=f"{prefix}/docs/assets/swagger-ui-bundle.js",
            swagger_css_url=f"{prefix}/docs/assets/swagger-ui.css",
            swagger_favicon_url=f"{prefix}/docs/assets/favicon.png",
        )

    async def redoc(request: Request) -> Response:
        prefix = str(request.scope.get("root_path", ""))
        return get_redoc_html(
            openapi_url=f"{prefix}{app.openapi_url}",
            title=TITLE,
            redoc_js_url=f"{prefix}/docs/assets/redoc.standalone.js",
            redoc_favicon_url=f"{prefix}/docs/assets/favicon.png",
            with_google_fonts=False,
        )

    app.add_route("/docs", swagger, include_in_schema=False)
    app.add_route("/redoc", redoc, include_in_schema=False)
    for name, media_type in ASSETS.items():
        app.add_route(
            f"/docs/assets/{name}", serve_file((FOLDER / name).read_bytes(), media_type), include_in_schema=False
        )
