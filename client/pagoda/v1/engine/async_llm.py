"""The asynchronous engine, under the module name of vLLM's V1."""

from pagoda import AsyncLLM

__all__ = ["AsyncLLM"]
