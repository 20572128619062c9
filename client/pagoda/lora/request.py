"""LoRARequest: which adapter a request wants. Every call that is given one refuses it."""

from dataclasses import dataclass


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
