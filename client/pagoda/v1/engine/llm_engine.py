"""The engine that is driven step by step, where vLLM's V1 has it."""

from pagoda import LLMEngine

__all__ = ["LLMEngine"]
