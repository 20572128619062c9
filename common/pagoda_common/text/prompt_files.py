"""The content of config_sentence_transformers.json: prompts before texts, and how vectors are compared."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagoda_common.errors import InvalidRequest

FILE = "config_sentence_transformers.json"
_COHERE_NAMES = {"search_query": ("query", "s2p_query"), "search_document": ("document", "passage", "corpus")}
"""Cohere's input_type, and names that checkpoints have for the same."""


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """The prompt files of one checkpoint."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name."""
    default: str | None = None
    """The name of the one that texts have that name none."""
    similarity: str = "cosine"
    """cosine, dot, euclidean or manhattan."""

    def prompt_of(self, name: str | None, *, is_strict: bool = True) -> str:
        """The prompt before a text.

        Args:
            name: None takes the default.
            is_strict: a name that is not there is an error, not nothing.

        Raises:
            InvalidRequest: there is no prompt of this name.
        """
        name = self.default if name is None else name
        if name is None:
            return ""
        for one in (name, *_COHERE_NAMES.get(name, ())):
            if one in self.prompts:
                return self.prompts[one]
        if is_strict:
            known = ", ".join(self.prompts) or "none"
            text = f"prompt_name is {name[:100]!r}, must be one of the model's prompts: {known[:500]}"
            raise InvalidRequest(text, field="prompt_name")
        return ""


def read_prompt_files(directory: Path) -> PromptFiles:
    """The content of the file in a checkpoint's directory; empty if it is missing or unreadable."""
    try:
        config = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return PromptFiles()
    if not isinstance(config, dict):
        return PromptFiles()
    prompts, default, kind = (config.get(name) for name in ("prompts", "default_prompt_name", "similarity_fn_name"))
    texts = prompts.items() if isinstance(prompts, dict) else ()
    known = {str(name): text for name, text in texts if isinstance(text, str)}
    return PromptFiles(
        known,
        default if isinstance(default, str) and default in known else None,
        kind if kind in ("cosine", "dot", "euclidean", "manhattan") else "cosine",
    )
