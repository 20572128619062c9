"""Calls of operators, probes, scrapers and tools: health, readiness, models, version, load, metrics, tokens."""

import asyncio
from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pagoda_common.errors import NotReady
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.version import VERSION
from pagoda_frontend.conversation.template import token_ids_of, token_strings
from pagoda_frontend.http.body import json_response, read_body
from pagoda_frontend.http.by_model import named_in_query
from pagoda_frontend.observability.merged_metrics import merged
from pagoda_frontend.openai.protocol import DetokenizeBody, TokenizeBody
from pagoda_frontend.requests.params import check_token_ids
from pagoda_frontend.serving.models import Models
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import RETRY_AFTER_S, Serving

TOKEN_BYTES = 16
"""Bytes per token for estimating the size of an answer."""


class Operations:
    """The endpoints of the server."""

    def __init__(self, *, models: Models) -> None:
        self._models = models

    async def live(self) -> Response:
        """200 as long as the process answers, in any state of the engine."""
        return Response(status_code=200)

    async def health(self) -> Response:
        """503 with the reason until the model is served for the first time, then 200. vLLM's tools wait for it."""
        if not self._models.has_been_ready:
            raise NotReady(self._models.not_ready_reason, retry_after_s=RETRY_AFTER_S)
        return Response(status_code=200)

    async def ready(self) -> Response:
        """200 if new requests are served, or wait for a lost scheduler; otherwise 503 with the reason."""
        if not self._models.is_ready:
            raise NotReady(self._models.not_ready_reason, retry_after_s=RETRY_AFTER_S)
        return json_response({"status": "ready"})

    async def version(self) -> Response:
        """The version of Pagoda."""
        return json_response({"version": VERSION})

    async def load(self) -> Response:
        """The number of open requests."""
        return json_response({"server_load": self._models.num_open})

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' text format; only those of one model if the query names it."""
        one = named_in_query(request, self._models)
        text = await (metrics_text(self._models) if one is None else one.metrics.render())
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self) -> Response:
        """The names of all served models, and of their adapters."""
        known = [one for one in self._models.servings if one.has_been_ready] or [self._models.first]
        cards = [card for serving in known for card in _cards(serving)]
        return json_response({"object": "list", "data": cards})

    async def model(self, model_id: str) -> Response:
        """One name of a model, or one adapter."""
        serving = await self._models.named(model_id)
        model = serving.model_named(model_id)
        return json_response(_model_card(model, model_id) if model.lora is None else _adapter_card(model, model.lora))


class TokenCalls:
    """The calls for tokens of a model."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text or a conversation."""
        serving = self._serving
        body = await read_body(request, TokenizeBody, serving=serving)
        model = serving.model_named(body.model)
        tokens = await token_ids_of(body, model=model, serving=serving)

        def answer() -> Response:
            strings = token_strings(tokens, body, tokenizer=model.tokenizer) if body.return_token_strs else None
            shown = {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens}
            return json_response({**shown, "token_strs": strings})

        return await serving.work.run_sized(answer, num_bytes=TOKEN_BYTES * len(tokens))

    async def tokenizer_info(self, request: Request) -> Response:
        """The tokenizer's class, its special tokens, and the chat template in use."""
        model = self._serving.model
        tokenizer = model.tokenizer
        info: dict[str, Any] = {
            **tokenizer.special_tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "name_or_path": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": model.max_model_len,
            "chat_template": self._serving.chat_template or tokenizer.chat_template,
        }
        return json_response(info)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, including special tokens."""
        serving = self._serving
        body = await read_body(request, DetokenizeBody, serving=serving)
        model = serving.model_named(body.model)

        def answer() -> Response:
            check_token_ids(body.tokens, vocab_size=model.vocab_size, field="tokens")
            return json_response({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})

        return await serving.work.run_sized(answer, num_bytes=TOKEN_BYTES * len(body.tokens))


async def metrics_text(models: Models) -> bytes:
    """The metrics of all models in Prometheus' text format."""
    texts = await asyncio.gather(*(serving.metrics.render() for serving in models.servings))
    return merged(dict(zip(models.names, texts, strict=True))) if models.are_several else texts[0]


def _cards(serving: Serving) -> list[dict[str, Any]]:
    model, adapters = serving.model, serving.engine.loras
    cards = [_model_card(model, name) for name in model.names]
    return cards + [_adapter_card(model, adapters[name]) for name in sorted(adapters)]


def _adapter_card(model: ServedModel, adapter: LoraAdapter) -> dict[str, Any]:
    parent = adapter.base_model_name or model.names[0]
    return {**_model_card(model, adapter.name), "root": adapter.path, "parent": parent}


def _model_card(model: ServedModel, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{model.fingerprint}",
        "object": "model_permission",
        "created": model.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "pagoda",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [permission],
    }
