"""The asynchronous engine, where vLLM's V1 has it."""

from pagoda import AsyncLLM

__all__ = ["AsyncLLM"]
