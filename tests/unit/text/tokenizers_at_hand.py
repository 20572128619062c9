"""Real tokenizers for these tests: the embedded one, and popular ones from tests/data."""

import tarfile
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.text.tokenizer_files import TokenizerFiles

FOLDER = Path(__file__).parents[2] / "data"
BYTE_LEVEL = [EMBEDDED_MODEL, "gpt-2", "mpt", "falcon"]
BYTE_FALLBACK = ["phi-3", "mistral-v1", "mistral-v3"]
NAMES = BYTE_LEVEL + BYTE_FALLBACK


@lru_cache
def archive() -> dict[str, bytes]:
    """The files tokenizer.json by model name."""
    with tarfile.open(FOLDER / "tokenizers.tar.xz") as tar:
        files = {member.name.removesuffix(".tokenizer.json"): tar.extractfile(member) for member in tar}
        return {name: file.read() for name, file in files.items() if file is not None}


@lru_cache
def load(name: str) -> Tokenizer:
    if name == EMBEDDED_MODEL:
        return Tokenizer.load(name)
    files = TokenizerFiles(directory=FOLDER, config={}, special_tokens={})
    return Tokenizer(name=name, fast=FastTokenizer.from_str(archive()[name].decode()), files=files)


@lru_cache
def byte_tokenizer() -> Tokenizer:
    """A token a byte."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    files = TokenizerFiles(directory=FOLDER, config={}, special_tokens={})
    return Tokenizer(name="bytes", fast=fast, files=files)
