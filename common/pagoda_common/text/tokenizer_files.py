"""Finds and reads the files that make a tokenizer. Knows file names and their history; no text."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.checkpoint.translated_files import TOKENIZER_FAULT
from pagoda_common.errors import ModelLoadError
from pagoda_common.mistral.tekken import SPECIAL_TOKENS, TEKKEN, load_tekken, tekken_template
from pagoda_common.text.prompt_files import FILE as PROMPTS_FILE
from pagoda_common.text.prompt_files import PromptFiles, read_prompt_files

FILE_PATTERNS = [
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "chat_template.*",
    "additional_chat_templates/*",
    PROMPTS_FILE,
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
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error


def _content(token: Any) -> str | None:
    """The text of a token that is written as a string or as an AddedToken object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _added_token(token: Any, special: set[str]) -> AddedToken:
    """`token`, special if it says so, if it is one of `special`, or if it says nothing."""
    content = _content(token)
    assert content is not None
    if not isinstance(token, dict):
        return AddedToken(content, special=True, normalized=False)
    flags = {name: bool(token[name]) for name in ("lstrip", "rstrip", "normalized", "single_word") if name in token}
    return AddedToken(content, special=bool(token.get("special")) or content in special, **flags)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """A checkpoint's settings of its tokenizer."""

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
        if (directory / TEKKEN).exists() and not (directory / "tokenizer.json").exists():
            return cls._of_tekken(directory)
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

    @property
    def prompt_files(self) -> PromptFiles:
        """Prompts before texts that are embedded."""
        return read_prompt_files(self.directory)

    @classmethod
    def _of_tekken(cls, directory: Path) -> Self:
        """From Mistral's tekken.json, with a chat_template.jinja in the same directory, if any."""
        templates = {"default": tekken_template(directory / TEKKEN)} | _read_chat_templates(directory, {})
        return cls(directory=directory, config={}, special_tokens=dict(SPECIAL_TOKENS), chat_templates=templates)

    def load_fast_tokenizer(self) -> FastTokenizer:
        """Read the vocabulary.

        Raises:
            ModelLoadError: there is none that can be read.
        """
        path = self.directory / "tokenizer.json"
        try:
            if path.exists():
                fast = FastTokenizer.from_file(str(path))
                self._complete(fast)
                return fast
            if (self.directory / TEKKEN).exists():
                return load_tekken(self.directory / TEKKEN)
            if (self.directory / "vocab.json").exists() and self.config.get("tokenizer_class") in GPT2_CLASSES:
                return self._load_gpt2()
        except ModelLoadError:
            raise
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ModelLoadError(f"the tokenizer in {self.directory} cannot be read: {error}") from error
        fault = self.directory / TOKENIZER_FAULT
        if fault.exists():
            raise ModelLoadError(fault.read_text(encoding="utf-8"), field="tokenizer")
        raise ModelLoadError(f"{self.directory} has no tokenizer.json", field="tokenizer")

    def _complete(self, fast: FastTokenizer) -> None:
        """Add the tokens that only tokenizer_config.json names."""
        known = {token.content for token in fast.get_added_tokens_decoder().values()}
        tokens = [token for token in self._added_tokens() if token.content not in known]
        # A role's token that no file gives an id has no row in the model either.
        written = {_content(token) for _, token in self._decoder}
        fast.add_tokens(
            [token for token in tokens if token.content in written or fast.token_to_id(token.content) is not None]
        )

    @property
    def _decoder(self) -> list[tuple[int, Any]]:
        """Tokens of tokenizer_config.json, and of the older added_tokens.json, by id, ascending."""
        decoder = self.config.get("added_tokens_decoder")
        tokens = {int(token_id): token for token_id, token in decoder.items()} if isinstance(decoder, dict) else {}
        older = _read_json(self.directory / "added_tokens.json")
        for content, token_id in older.items() if isinstance(older, dict) else ():
            if isinstance(token_id, int):
                tokens.setdefault(token_id, {"content": content, "normalized": False})
        return sorted(tokens.items())

    def find_token_id(self, role: str) -> int | None:
        """Id of a role's token ("eos_token"), without loading the tokenizer; None where there is no such token.

        Raises:
            ModelLoadError: a file is not valid JSON.
        """
        text = self.special_tokens.get(role)
        if text is None:
            return None
        if (self.directory / TEKKEN).exists() and not (self.directory / "tokenizer.json").exists():
            return {"<unk>": 0, "<s>": 1, "</s>": 2}.get(text)
        written = [token_id for token_id, token in self._decoder if _content(token) == text]
        if written:
            return written[0]
        file = _read_json(self.directory / "tokenizer.json")
        added = [token["id"] for token in file.get("added_tokens") or () if token.get("content") == text]
        vocabulary = (file.get("model") or {}).get("vocab") or _read_json(self.directory / "vocab.json")
        if isinstance(vocabulary, list):  # Unigram: [token, score] in order of ids
            vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
        found = added[0] if added else vocabulary.get(text)
        return found if isinstance(found, int) else None

    def _added_tokens(self) -> list[AddedToken]:
        """Tokens of tokenizer_config.json in order of their ids, then special tokens by their roles."""
        roles = [self.config.get("additional_special_tokens"), self.config.get("extra_special_tokens")]
        extra = [token for tokens in roles for token in (tokens if isinstance(tokens, list) else [])]
        extra += [token for tokens in roles for token in (tokens.values() if isinstance(tokens, dict) else [])]
        specials = [*self.special_tokens.values(), *extra]
        names = {content for token in specials if (content := _content(token))}
        tokens = [
            _added_token(token, names)
            for token in [*(token for _, token in self._decoder), *specials]
            if _content(token)
        ]
        found: dict[str, AddedToken] = {}
        for token in tokens:  # one that is named again keeps its place, and with it its id
            found.setdefault(token.content, token)
        return list(found.values())

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
