"""The engine that is driven step by step, under vLLM's module name."""

from pagoda import LLMEngine

__all__ = ["LLMEngine"]
