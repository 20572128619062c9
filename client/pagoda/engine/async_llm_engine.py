"""The asynchronous engine under vLLM's module name: AsyncLLM with its older name."""

from pagoda import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
