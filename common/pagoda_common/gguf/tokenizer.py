"""Converts the tokenizer in a GGUF file's metadata to a checkpoint's tokenizer files. Knows no tensors.

Sources: the keys tokenizer.ggml.* of the GGUF specification; the splitting patterns are those that the models'
tokenizer.json files publish.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf.file import GgufFile

logger = logging.getLogger(__name__)

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level BPE parts a text before it merges."""

    patterns: tuple[str, ...]
    """One after the other."""
    is_normalized: bool = False
    """Texts are composed (NFC) before."""
    ignores_merges: bool = False
    """A part that is a token as a whole is that token, whatever the merges give."""


_LLAMA3 = Splitting((_LETTERS + r"\p{N}{1,3}" + _REST,), ignores_merges=True)
_QWEN2 = Splitting((_LETTERS + r"\p{N}" + _REST,), is_normalized=True)
SPLITTINGS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": Splitting((_GPT2,)),
    "phi-2": Splitting((_GPT2,)),
    "olmo": Splitting((_GPT2,)),
    "smollm": Splitting((r"\p{N}", _GPT2)),
    "starcoder": Splitting((r"\p{N}", _GPT2)),
    "refact": Splitting((r"\p{N}", _GPT2)),
    "tekken": Splitting((_TEKKEN,), ignores_merges=True),
}
"""By tokenizer.ggml.pre."""
_BY_ARCHITECTURE = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}
"""For older files, which do not say."""
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
"""Values of tokenizer.ggml.token_type; 1 is an ordinary token, 2 the unknown one, 5 unused."""
END_NAMES = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|return|>",
)
"""Control tokens that end an answer, whatever else a file says: converters wrote the end of a turn for long nowhere."""
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""In tokenizer_config.json, and after tokenizer.ggml."""
MAX_TOKEN_CHARS = 1024
"""Each token is tried as two at every place in it."""


def tokenizer_files(file: GgufFile) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json and generation_config.json, as texts by name.

    Raises:
        ModelLoadError: there is no vocabulary, or one of a kind that is not read.
    """
    vocabulary = _Vocabulary.read(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        fast = _byte_level(vocabulary)
    elif kind == "llama":
        fast = _sentence_pieces(vocabulary)
    else:
        raise vocabulary.wrong("model", kind, "gpt2 or llama; --tokenizer names another one")
    _add_tokens(fast, vocabulary)
    begin = vocabulary.token("bos_token_id")
    if vocabulary.flag("add_bos_token", kind == "llama") and begin is not None:
        fast.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"],
            pair=[begin, "$A", begin, "$B"],
            special_tokens=[(begin, vocabulary.ids[begin])],
        )
    return {
        "tokenizer.json": fast.to_str(),
        "tokenizer_config.json": json.dumps(_tokenizer_config(vocabulary), ensure_ascii=False),
        "generation_config.json": json.dumps(_generation_config(vocabulary)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Vocabulary:
    """Keys tokenizer.ggml.* of one file."""

    file: GgufFile
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, file: GgufFile) -> "_Vocabulary":
        tokens, types = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise ModelLoadError(f"{file.path} has no tokenizer.ggml.tokens, a list of texts", field="tokenizer")
        longest = max(map(len, tokens))
        if longest > MAX_TOKEN_CHARS:
            message = f"{file.path} has a token of {longest} characters, must have at most {MAX_TOKEN_CHARS}"
            raise ModelLoadError(message, field="tokenizer")
        if types is None:
            types = [1] * len(tokens)
        if not isinstance(types, list) or len(types) != len(tokens) or not all(isinstance(one, int) for one in types):
            raise ModelLoadError(f"{file.path} must have a tokenizer.ggml.token_type for each token", field="tokenizer")
        ids: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            ids.setdefault(token, token_id)
        return cls(file=file, tokens=tokens, types=types, ids=ids)

    def wrong(self, key: str, value: object, wanted: str) -> ModelLoadError:
        shown = "missing" if value is None else repr(value)[:200]
        return ModelLoadError(f"{self.file.path}: tokenizer.ggml.{key} is {shown}, must be {wanted}", field="tokenizer")

    def list(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """A list that must be there."""
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
            raise self.wrong(key, value, "a list")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean that may be there."""
        return bool(self.file.metadata.get(f"tokenizer.ggml.{key}", default))

    def token_id(self, key: str) -> int | None:
        """A token of a role."""
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def token(self, key: str) -> str | None:
        """The same, as text."""
        token_id = self.token_id(key)
        return None if token_id is None else self.tokens[token_id]


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """As GPT-2's: bytes as visible characters, pairs merged by rank."""
    name = vocabulary.file.metadata.get("tokenizer.ggml.pre")
    if name in (None, "default"):
        architecture = str(vocabulary.file.metadata.get("general.architecture"))
        name = _BY_ARCHITECTURE.get(architecture, "gpt-2")
        logger.warning("%s does not say how its tokenizer parts texts: taken as %s", vocabulary.file.path, name)
    if not isinstance(name, str) or name not in SPLITTINGS:
        wanted = f"one of {', '.join(SPLITTINGS)}; --tokenizer names another one"
        raise vocabulary.wrong("pre", name, wanted)
    splitting, merges = SPLITTINGS[name], []
    for pair in vocabulary.list("merges", str):
        first, space, second = pair.partition(" ")
        if not space or first not in vocabulary.ids or second not in vocabulary.ids:
            raise vocabulary.wrong("merges", pair, "two tokens with a space between them")
        if first + second in vocabulary.ids:
            merges.append((first, second))
    fast = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=splitting.ignores_merges, fuse_unk=False)
    )
    if splitting.is_normalized:
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    return fast


def _sentence_pieces(vocabulary: _Vocabulary) -> Tokenizer:
    """As SentencePiece's BPE: the pair whose token has the best score is merged first; other characters are bytes."""
    scores = vocabulary.list("scores", (int, float))
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.wrong("scores", f"{len(scores)} values", f"{len(vocabulary.tokens)}, one a token")
    unknown = vocabulary.token("unknown_token_id")
    fast = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges(vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.types,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    undone: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        undone.append(decoders.Strip(" ", 1, 0))
    fast.normalizer = normalizers.Sequence(steps)
    fast.decoder = decoders.Sequence(undone)
    return fast


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that are a token together, the best score first."""
    ids = vocabulary.ids
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in ids.items():
        if vocabulary.types[token_id] not in (1, _USER_DEFINED):
            continue
        for at in range(1, len(token)):
            first, second = token[:at], token[at:]
            if first in ids and second in ids:
                ranked.append((-scores[token_id], ids[first], ids[second], first, second))
    ranked.sort()
    return [(first, second) for _, _, _, first, second in ranked]


def _add_tokens(fast: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are found in a text before anything else; control tokens are left out of texts."""
    roles = {vocabulary.token_id(key) for key in _ROLES.values()}
    added = []
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        is_special = kind == _CONTROL or token_id in roles
        if (is_special or kind == _USER_DEFINED) and token and vocabulary.ids[token] == token_id:
            added.append(AddedToken(token, special=is_special, normalized=False))
    fast.add_tokens(added)


def _tokenizer_config(vocabulary: _Vocabulary) -> dict[str, Any]:
    metadata: Mapping[str, Any] = vocabulary.file.metadata
    config: dict[str, Any] = {role: vocabulary.token(key) for role, key in _ROLES.items()}
    templates = {
        key.removeprefix("tokenizer.chat_template").lstrip(".") or "default": value
        for key, value in metadata.items()
        if (key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")) and isinstance(value, str)
    }
    if set(templates) == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return {name: value for name, value in config.items() if value is not None}


def _generation_config(vocabulary: _Vocabulary) -> dict[str, Any]:
    ends = [vocabulary.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    ends += [
        vocabulary.ids[name]
        for name in END_NAMES
        if name in vocabulary.ids and vocabulary.types[vocabulary.ids[name]] in (_CONTROL, _USER_DEFINED)
    ]
    found = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    begin = vocabulary.token_id("bos_token_id")
    return ({} if begin is None else {"bos_token_id": begin}) | ({"eos_token_id": found} if found else {})
