"""The engine's arguments, where vLLM has them."""

from pagoda import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
