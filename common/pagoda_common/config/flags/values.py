"""Converts texts of flags to values: numbers with suffixes, and names in vLLM's spelling. Raises
argparse.ArgumentTypeError."""

import argparse
import re

from pagoda_common.config.engine_config import FIT_MEMORY

_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SUFFIX |= {letter.upper(): 1024**power for power, letter in enumerate("kmgt", start=1)}
_BYTE_SUFFIX = _SUFFIX | {"B": 1}
_BYTE_SUFFIX |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_BYTE_SUFFIX |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}


def _quantity(text: str, suffixes: dict[str, int], examples: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in suffixes:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as {examples}")
    return int(float(match[1]) * suffixes[match[2]]) if "." in match[1] else int(match[1]) * suffixes[match[2]]


def parse_count(text: str) -> int:
    """A number of tokens: 8192, 8k (8000), 8K (8192), 1.5M. Small letters are decimal, capitals binary, as in vLLM."""
    return _quantity(text, _SUFFIX, "8192, 8k (8000) or 8K (8192)")


def parse_bytes(text: str) -> int:
    """A number of bytes: 1000000, 512M and 512MiB (binary), 2GB and 2g (decimal)."""
    return _quantity(text, _BYTE_SUFFIX, "512M, 2GiB (binary) or 2GB (decimal)")


def parse_max_model_len(text: str) -> int:
    """As `parse_count`; -1 and auto are FIT_MEMORY."""
    return FIT_MEMORY if text in ("-1", "auto") else parse_count(text)


def parse_dtype(text: str) -> str:
    """Our names, and vLLM's: half, float."""
    return {"half": "float16", "float": "float32"}.get(text.removeprefix("torch."), text.removeprefix("torch."))


def parse_load_format(text: str) -> str:
    """Our names, and vLLM's for what auto finds by itself."""
    return {"hf": "auto", "mistral": "auto", "gguf": "auto"}.get(text, text)


def parse_attention_backend(text: str) -> str:
    """Our names, and vLLM's: TRITON_ATTN, FLASHINFER, FLASH_ATTN."""
    return {"triton_attn": "triton"}.get(text.lower(), text.lower())


def parse_model_impl(text: str) -> str:
    """Our names, and vLLM's for its own implementations."""
    return {"vllm": "pagoda"}.get(text, text)
