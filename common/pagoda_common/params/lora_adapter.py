"""LoraAdapter: which LoRA adapter a request is computed with. Plain data; knows no files."""

from dataclasses import dataclass, replace

from pagoda_common.errors import InvalidRequest

MAX_NAME_CHARS = 512
MAX_PATH_CHARS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraAdapter:
    """Low-rank matrices that are added to some of the model's, by name."""

    name: str
    """By which requests ask for it, as for a model."""
    path: str = ""
    """Directory or hub id of its PEFT checkpoint; empty: what the scheduler knows of the name."""
    version: int = 0
    """Which of several weights of the same name: Unix time in nanoseconds of the call that added them."""
    base_model_name: str = ""
    """Model that it was made for, as its owner says."""
    is_pinned: bool = False
    """Its weights stay in the workers' memory."""

    def __post_init__(self) -> None:
        for field, value, bound in (
            ("name", self.name, MAX_NAME_CHARS),
            ("path", self.path, MAX_PATH_CHARS),
            ("base_model_name", self.base_model_name, MAX_NAME_CHARS),
        ):
            if len(value) > bound:
                raise InvalidRequest(
                    f"lora {field} has {len(value)} characters, must have at most {bound}", field=field
                )
        if not self.name:
            raise InvalidRequest("lora name is '', must not be empty", field="name")
        if any(not character.isprintable() for character in self.name + self.path):
            raise InvalidRequest("lora name and path must have printable characters alone", field="name")

    @property
    def key(self) -> tuple[str, str, int]:
        """Key of its weights."""
        return self.name, self.path, self.version

    @property
    def digest_text(self) -> bytes:
        """The key as bytes, different for different keys."""
        return "\0".join((self.name, self.path, str(self.version))).encode()

    def pinned(self, is_pinned: bool) -> "LoraAdapter":
        """The same, pinned or not."""
        return replace(self, is_pinned=is_pinned)
