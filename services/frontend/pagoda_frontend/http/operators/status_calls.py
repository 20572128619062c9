"""Data of the status page besides /metrics: history, facts of the server, and the caller's own requests."""

import platform
import time
from typing import Any

from fastapi import FastAPI, Request, Response

from pagoda_common.errors import NotFound
from pagoda_common.version import VERSION
from pagoda_frontend.http.body import json_response
from pagoda_frontend.http.by_model import named_in_query
from pagoda_frontend.http.calls import tenant_of
from pagoda_frontend.observability.history import PERIOD_S
from pagoda_frontend.observability.request_log import LoggedCall
from pagoda_frontend.serving.models import Models
from pagoda_frontend.serving.serving import Serving

REQUESTS_PATH = "/status/requests"
"""A guarded path: with keys, each key sees and aborts only its own tenant's calls."""


class StatusCalls:
    """The page's own endpoints, which are not part of the OpenAPI document."""

    def __init__(self, *, models: Models) -> None:
        self._models = models
        self._serving = models.first

    def add_to(self, app: FastAPI) -> None:
        """Serve them."""
        app.add_route("/status/history", self.history, include_in_schema=False)
        app.add_route("/status/facts", self.facts, include_in_schema=False)
        app.add_route(REQUESTS_PATH, self.requests, include_in_schema=False)
        path = REQUESTS_PATH + "/{request_id:path}/abort"
        app.add_route(path, self.abort, methods=["POST"], include_in_schema=False)

    async def history(self, request: Request) -> Response:
        """Figures of the last 15 minutes, in columns: of the model that the query names, else of the first."""
        return json_response({"period_s": PERIOD_S, "columns": self._model(request).history.columns()})

    async def facts(self, request: Request) -> Response:
        """Facts of the server and of one model (as in `history`): versions, limits, parsers."""
        serving = self._model(request)
        config = serving.config
        facts: dict[str, Any] = {
            "version": VERSION,
            "python": platform.python_version(),
            "uptime_s": round(time.monotonic() - serving.started_s),
            "tool_call_parser": config.tool_call_parser,
            "reasoning_parser": config.reasoning_parser,
            "needs_key": serving.has_api_keys,
        }
        if self._models.are_several:
            facts["several"] = self._models.names
        if serving.has_been_ready and not serving.is_draining:
            model = serving.model
            facts |= {
                "models": list(model.names),
                "max_model_len": model.max_model_len,
                "vocab_size": model.vocab_size,
                "has_chat_template": (serving.chat_template or model.tokenizer.chat_template) is not None,
            }
        return json_response(facts)

    async def requests(self, request: Request) -> Response:
        """Calls that run, and the last ones that ended; with keys, the caller's own."""
        tenant = self._tenant(request)
        log = self._serving.request_log
        return json_response(
            {
                "running": [_shown(call) for call in log.running(tenant)],
                "ended": [_shown(call) for call in log.ended(tenant)],
            }
        )

    async def abort(self, request: Request) -> Response:
        """End a call that runs here.

        Raises:
            NotFound: the caller has no call with this id.
        """
        request_id, tenant = request.path_params["request_id"], self._tenant(request)
        found = [call for call in self._serving.request_log.running(tenant) if call.request_id == request_id]
        servings = self._models.servings
        aborted = [serving.abort(request_id, tenant=call.tenant) for call in found for serving in servings]
        if not any(aborted):
            raise NotFound(f"no request {request_id!r} is running at this frontend", field="request_id")
        return json_response({"aborted": request_id})

    def _model(self, request: Request) -> Serving:
        return named_in_query(request, self._models) or self._models.first

    def _tenant(self, request: Request) -> str | None:
        """The tenant whose calls the caller may see; None: all, if there are no keys."""
        return tenant_of(request, serving=self._serving) if self._serving.has_api_keys else None


def _shown(call: LoggedCall) -> dict[str, Any]:
    return {
        "id": call.request_id,
        "state": call.state,
        "started": round(call.started_s, 3),
        "duration_s": None if call.duration_s is None else round(call.duration_s, 3),
        "first_token_s": None if call.first_token_s is None else round(call.first_token_s, 4),
        "prompt_tokens": call.num_prompt_tokens,
        "output_tokens": call.num_output_tokens,
        "sequences": call.num_sequences,
        "reason": call.reason,
    }
