"""LoRARequest: which adapter a request wants, as programs for vLLM name it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.lora_adapter import LoraAdapter


@dataclass(slots=True)
class LoRARequest:
    """An adapter, as programs for vLLM name it.

    Raises:
        ValueError: lora_int_id is below 1.
    """

    lora_name: str
    """Name of the adapter."""
    lora_int_id: int
    """Its number, at least 1 and unique among adapters."""
    lora_path: str = ""
    """Directory or hub id of its weights."""
    base_model_name: str | None = None
    """Model that it was made for."""
    load_inplace: bool = False
    """Accepted: another lora_int_id loads the weights again."""

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id}, must be at least 1")

    @property
    def name(self) -> str:
        """lora_name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """lora_path."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """lora_int_id."""
        return self.lora_int_id

    @property
    def adapter(self) -> LoraAdapter:
        """As the engine knows it: another number, name or path is another adapter.

        Raises:
            InvalidRequest: name or path are empty, or too long.
        """
        if not self.lora_path:
            raise InvalidRequest(f"lora_request {self.lora_name!r} has no lora_path", field="lora_request")
        base = self.base_model_name or ""
        return LoraAdapter(name=self.lora_name, path=self.lora_path, version=self.lora_int_id, base_model_name=base)


def adapter_of(lora_request: Any) -> LoraAdapter | None:
    """The adapter that a call asks for; None: none.

    Raises:
        InvalidRequest: it is no LoRARequest, or names nothing.
    """
    if lora_request is None:
        return None
    if not isinstance(lora_request, LoRARequest):
        message = f"lora_request must be a LoRARequest, got {type(lora_request).__name__}"
        raise InvalidRequest(message, field="lora_request")
    return lora_request.adapter


def adapters_of(lora_request: Any, num_prompts: int) -> list[LoraAdapter | None]:
    """The same for each of several prompts: one request for all of them, or a list.

    Raises:
        InvalidRequest: as `adapter_of`; or the list has another length.
    """
    if not isinstance(lora_request, Sequence) or isinstance(lora_request, str):
        return [adapter_of(lora_request)] * num_prompts
    if len(lora_request) != num_prompts:
        message = f"lora_request has {len(lora_request)} entries, there are {num_prompts} prompts"
        raise InvalidRequest(message, field="lora_request")
    return [adapter_of(one) for one in lora_request]
