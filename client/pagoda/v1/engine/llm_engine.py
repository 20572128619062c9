"""The engine that is driven step by step, under the module name of vLLM's V1."""

from pagoda import LLMEngine

__all__ = ["LLMEngine"]
