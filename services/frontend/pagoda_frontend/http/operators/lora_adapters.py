"""Operators' calls that load and unload adapters while requests run. Served with --enable-runtime-lora-updating."""

from fastapi import Request, Response

from pagoda_common.engine.client import EngineClient
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_frontend.http.body import read_body
from pagoda_frontend.http.operators.sleep_mode import allowed_weights
from pagoda_frontend.openai.protocol import LoadLoraAdapterBody, UnloadLoraAdapterBody
from pagoda_frontend.serving.models import Models, name_of
from pagoda_frontend.serving.serving import Serving

FIELDS = {"name": "lora_name", "path": "lora_path"}
"""Names in the body of an adapter's fields."""


class LoraAdapters:
    """vLLM's endpoints of the same names. They answer when the change holds for every frontend."""

    def __init__(self, *, serving: Serving, engine: EngineClient, models: Models) -> None:
        self._serving = serving
        self._models = models
        self._engine = engine

    async def load(self, request: Request) -> Response:
        """Load an adapter and serve it under a name.

        Raises:
            PagodaError: the adapter cannot be used, or its path is not allowed.
        """
        body = await read_body(request, LoadLoraAdapterBody, serving=self._serving)
        if body.lora_name in self._serving.model.names:
            message = f"lora_name is {body.lora_name!r}, which is the model's own name"
            raise InvalidRequest(message, field="lora_name")
        other = self._models.known(body.lora_name)
        if other is not None and other is not self._serving:
            message = f"lora_name is {body.lora_name!r}, which is a name of the model {name_of(other)}"
            raise InvalidRequest(message, field="lora_name")
        path = allowed_weights(body.lora_path, allowed=self._serving.config.allowed_weights, field="lora_path")
        try:
            adapter = LoraAdapter(name=body.lora_name, path=path, base_model_name=body.base_model_name or "")
        except InvalidRequest as error:
            field = FIELDS.get(error.field, error.field) if error.field else None
            raise InvalidRequest(error.message, field=field) from None
        await self._engine.add_lora(adapter, load_inplace=bool(body.load_inplace))
        return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Unload an adapter. Running requests finish with it; new ones are refused.

        Raises:
            PagodaError: there is no adapter of that name.
        """
        body = await read_body(request, UnloadLoraAdapterBody, serving=self._serving)
        await self._engine.remove_lora(body.lora_name)
        return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain")
