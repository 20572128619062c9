"""Real tokenizers for these tests: the embedded one, and popular ones where they lie beside the project."""

from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.text.tokenizer_files import TokenizerFiles

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "tokenizers" / "json"
BYTE_LEVEL = [EMBEDDED_MODEL, "gpt-2", "mpt", "falcon"]
BYTE_FALLBACK = ["phi-3", "mistral-v1", "mistral-v3"]
NAMES = BYTE_LEVEL + BYTE_FALLBACK


@lru_cache
def load(name: str) -> Tokenizer:
    """The tokenizer; skips the test where it is not at hand."""
    if name == EMBEDDED_MODEL:
        return Tokenizer.load(name)
    path = FOLDER / f"{name}.tokenizer.json"
    if not path.exists():
        pytest.skip(f"{path} is not at hand")
    files = TokenizerFiles(directory=path.parent, config={}, special_tokens={})
    return Tokenizer(name=name, fast=FastTokenizer.from_file(str(path)), files=files)
