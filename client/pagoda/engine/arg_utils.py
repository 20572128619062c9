"""The engine's arguments, under vLLM's module name."""

from pagoda import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
