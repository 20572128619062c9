"""The tokenizer of a GGUF file gives the ids that the checkpoint's own, or transformers' reader of the file, gives."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pagoda_common.config.checkpoint import translated_files
from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf import directory
from pagoda_common.text import tokenizer as ours

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEXTS = (
    "",
    " ",
    "Hello, world! It's 2026; we've 12345 tokens.",
    "  two  spaces,\n\n newlines \t tabs  ",
    "Grüße, 東京, привет, 👩‍👩‍👧 and e\u0301 composed",
    "def f(x):\n    return x ** 2 # comment\r\n",
    "<|begin|>user\nhi<|end|> tail<|end|>",
    "'S 'RE don't WON'T 1,000,000.5e-10",
)
CHAT = "{% for message in messages %}<|begin|>{{ message.content }}<|end|>{% endfor %}"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_files, "cache_home", lambda: tmp_path / "cache")


def write(path: Path, architecture: str, keys: dict[str, Any]) -> Path:
    """A file with one tensor, and keys of tokenizer.ggml."""
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys.items():
        name = key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}"
        kind = gguf.GGUFValueType.get_type(value)
        inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(name, value, gguf.GGUFValueType.UINT32 if type(value) is int else kind, inner)
    writer.add_tensor("token_embd.weight", np.zeros((len(keys.get("tokens", [0])), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def trained(pattern: str, *, ignores_merges: bool) -> Tokenizer:
    """A byte-level BPE over the repository's documents."""
    fast = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    root = Path(__file__).parents[4]
    fast.train([str(path) for path in sorted((root / "docs").glob("*.md"))[:6]], trainer)
    fast.add_special_tokens([AddedToken("<|begin|>", normalized=False), AddedToken("<|end|>", normalized=False)])
    fast.add_tokens([AddedToken("<tool>", normalized=False)])
    return fast


def bpe_keys(fast: Tokenizer, pre: str) -> dict[str, Any]:
    """As llama.cpp's converter writes a tokenizer.json."""
    written = json.loads(fast.to_str())
    tokens = [fast.id_to_token(index) for index in range(fast.get_vocab_size())]
    types = [3 if token.startswith("<|") else 4 if token == "<tool>" else 1 for token in tokens]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in written["model"]["merges"]],
        "bos_token_id": tokens.index("<|begin|>"),
        "eos_token_id": tokens.index("<|end|>"),
        "add_bos_token": False,
        "tokenizer.chat_template": CHAT,
    }


@pytest.mark.parametrize(
    ("pattern", "pre", "architecture", "ignores_merges"),
    [(LLAMA3, "llama-bpe", "llama", True), (QWEN2, "qwen2", "qwen2", False)],
)
def test_byte_level_bpe(tmp_path: Path, pattern: str, pre: str, architecture: str, ignores_merges: bool) -> None:
    fast = trained(pattern, ignores_merges=ignores_merges)
    file = write(tmp_path / "model.gguf", architecture, bpe_keys(fast, pre))
    read = ours.Tokenizer.load(str(file))
    for text in (*TEXTS, (Path(__file__).parents[4] / "README.md").read_text(), "a <tool> b"):
        plain = text.replace("e\u0301", "é") if pre == "qwen2" else text
        assert read.encode(text) == fast.encode(plain).ids
        assert read.decode(read.encode(text), skip_special_tokens=False) == plain
    assert read.special_token_ids == {fast.token_to_id("<|begin|>"), fast.token_to_id("<|end|>")}
    assert (read.bos_token, read.eos_token_id) == ("<|begin|>", fast.token_to_id("<|end|>"))
    assert read.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|begin|>hi<|end|>"


def sentence_pieces() -> dict[str, Any]:
    """A vocabulary as SentencePiece's BPE has: pieces of the documents' words, the shortest first."""
    words = sorted({word for text in TEXTS for word in text.split() if word.isascii() and word.isalpha()})
    pieces: dict[str, None] = {}
    for word in words:
        for size in range(2, len(word) + 2):
            pieces["▁" + word[: size - 1]] = None
            pieces[word[-size + 1 :]] = None
    letters = sorted({letter for text in TEXTS for letter in text if letter.isascii() and letter.isprintable()})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    ordinary = [*(piece for piece in pieces if len(piece) > 1), "▁▁", "▁", *(one for one in letters if one != " "), "é"]
    ordinary = list(dict.fromkeys(ordinary))
    return {
        "model": "llama",
        "tokens": [*tokens, *ordinary],
        "scores": [0.0] * len(tokens) + [-float(rank) for rank in range(len(ordinary))],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(ordinary)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def test_sentence_pieces_are_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = write(tmp_path / "model.gguf", "llama", sentence_pieces())
    read = ours.Tokenizer.load(str(file))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in (text for text in TEXTS if text):
        if not text.startswith(" "):  # where SentencePiece prepends a space as well, and transformers does not
            assert read.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
        ids = read.encode(text)
        assert ids[0] == 1
        assert read.decode(ids) == text
    assert read.encode(" ")[1:] == [read.token_id("▁▁")]
    assert (
        read.encode("won't")[1:] != read.encode("東")[1:] == [read.token_id("▁"), *map(read.token_id, bytes_of("東"))]
    )


def bytes_of(text: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in text.encode()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "unheard-of"}, r"tokenizer\.ggml\.pre is 'unheard-of', must be one of llama-bpe"),
        ({"pre": ["a", "b"]}, r"tokenizer\.ggml\.pre is \['a', 'b'\], must be one of llama-bpe"),
        ({"model": ["a", "b"]}, r"tokenizer\.ggml\.model is \['a', 'b'\], must be gpt2 or llama"),
        ({"tokens": ["a", "b", "x" * 1025]}, "has a token of 1025 characters, must have at most 1024"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model is 't5', must be gpt2 or llama"),
        ({"merges": ["a nothing"]}, r"tokenizer\.ggml\.merges is 'a nothing', must be two tokens"),
        ({"token_type": [1, 1]}, r"must have a tokenizer\.ggml\.token_type for each token"),
        ({"tokens": [1, 2]}, r"has no tokenizer\.ggml\.tokens, a list of texts"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]}
    with pytest.raises(ModelLoadError, match=message):
        ours.Tokenizer.load(str(write(tmp_path / "model.gguf", "llama", keys | changes)))


def test_a_tokenizer_that_is_not_read_does_not_hold_up_the_model(tmp_path: Path) -> None:
    """--tokenizer may name another one."""
    keys = {"model": "t5", "tokens": ["a", "b"], "token_type": [1, 1]}
    made = directory.gguf_directory(write(tmp_path / "model.gguf", "llama", keys))
    assert json.loads((made / "config.json").read_text())["vocab_size"] == 2
    assert not (made / "tokenizer.json").exists()


def test_the_directory_is_written_once_and_anew_for_another_file(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", sentence_pieces())
    first = directory.gguf_directory(file)
    assert directory.gguf_directory(file) == first
    assert {path.name for path in first.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((first / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2]}
    assert not list((tmp_path / "cache").glob(".new*"))
    write(file, "llama", sentence_pieces() | {"eos_token_id": 1})
    assert directory.gguf_directory(file) != first


def test_a_cache_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    file = write(tmp_path / "model.gguf", "llama", sentence_pieces())
    assert directory.gguf_directory(file).is_relative_to(tmp_path / "tmp")
    assert not list((tmp_path / "cache").iterdir())
