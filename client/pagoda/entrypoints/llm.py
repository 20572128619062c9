"""The offline interface, where vLLM has it."""

from pagoda import LLM

__all__ = ["LLM"]
