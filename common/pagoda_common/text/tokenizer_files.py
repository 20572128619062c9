"""Finds and reads the files that make a tokenizer. Knows file names and their history; no text."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from pagoda_common.config.model_files import resolve_model
from pagoda_common.errors import ModelLoadError

FILE_PATTERNS = [
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*",
]
"""All that a tokenizer may need from a hub repository."""
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")


def find_tokenizer_files(name_or_path: str, *, revision: str | None = None) -> Path:
    """The directory with the tokenizer's files; from the hub or its cache for a hub id.

    Raises:
        ModelLoadError: there is no such directory, or the hub does not give it.
    """
    resolved = resolve_model(name_or_path)
    if isinstance(resolved, Path):
        return resolved
    from huggingface_hub import snapshot_download  # half a second, and only hub ids need it

    try:
        return Path(snapshot_download(resolved, revision=revision, allow_patterns=FILE_PATTERNS))
    except Exception as error:
        raise ModelLoadError(
            f"{name_or_path!r} is neither a directory nor the embedded model, and the hub did not give its tokenizer: "
            f"{error}",
            field="tokenizer",
        ) from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error


def _content(token: Any) -> str | None:
    """The text of a token that is written as a string or as an AddedToken object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """What a checkpoint says about its tokenizer."""

    directory: Path
    config: dict[str, Any]
    """tokenizer_config.json; empty when there is none."""
    special_tokens: dict[str, str]
    """bos_token, eos_token, … as text."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Jinja text by name; the usual one is "default"."""

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read everything but the vocabulary.

        Raises:
            ModelLoadError: a file is not valid JSON.
        """
        config = _read_json(directory / "tokenizer_config.json")
        known = {**_read_json(directory / "special_tokens_map.json"), **config}
        special_tokens = {
            name: content
            for name, token in known.items()
            if name.endswith("_token") and (content := _content(token)) is not None
        }
        return cls(
            directory=directory,
            config=config,
            special_tokens=special_tokens,
            chat_templates=_read_chat_templates(directory, config),
        )

    def load_fast_tokenizer(self) -> FastTokenizer:
        """Read the vocabulary.

        Raises:
            ModelLoadError: there is none that can be read.
        """
        path = self.directory / "tokenizer.json"
        try:
            if path.exists():
                return FastTokenizer.from_file(str(path))
            if (self.directory / "vocab.json").exists() and self.config.get("tokenizer_class") in GPT2_CLASSES:
                return self._load_gpt2()
        except ModelLoadError:
            raise
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ModelLoadError(f"the tokenizer in {self.directory} cannot be read: {error}") from error
        raise ModelLoadError(f"{self.directory} has no tokenizer.json", field="tokenizer")

    def _load_gpt2(self) -> FastTokenizer:
        """GPT-2's older files, vocab.json and merges.txt, which OPT still has."""
        vocabulary, merges = self.directory / "vocab.json", self.directory / "merges.txt"
        fast = FastTokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(self.config.get("add_prefix_space")))
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens(list(dict.fromkeys(self.special_tokens.values())))
        bos = self.special_tokens.get("bos_token")
        if self.config.get("add_bos_token") and bos is not None:
            fast.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, fast.token_to_id(bos))]
            )
        else:
            fast.post_processor = processors.ByteLevel(trim_offsets=False)
        return fast


def _read_chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates in order of precedence: files of their own, then tokenizer_config.json."""
    templates: dict[str, str] = {}
    inside = config.get("chat_template")
    if isinstance(inside, str):
        templates["default"] = inside
    elif isinstance(inside, list):
        templates |= {entry["name"]: entry["template"] for entry in inside}
    older = _read_json(directory / "chat_template.json")
    if isinstance(older.get("chat_template"), str):
        templates["default"] = older["chat_template"]
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (directory / "chat_template.jinja").exists():
        templates["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return templates
