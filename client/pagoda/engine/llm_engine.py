"""The engine that is driven step by step, where vLLM has it."""

from pagoda import LLMEngine

__all__ = ["LLMEngine"]
