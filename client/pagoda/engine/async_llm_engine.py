"""The asynchronous engine, where vLLM has it: AsyncLLM under its older name."""

from pagoda import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
