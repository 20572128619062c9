"""The offline interface, under vLLM's module name."""

from pagoda import LLM

__all__ = ["LLM"]
