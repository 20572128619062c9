"""Parsers of models' reasoning. Plugins derive from `ReasoningParser` and call `register_reasoning_parser`."""

from pagoda_frontend.reasoning_parsers.base import ReasoningParser, TaggedReasoningParser
from pagoda_frontend.reasoning_parsers.registry import register_reasoning_parser

__all__ = ["ReasoningParser", "TaggedReasoningParser", "register_reasoning_parser"]
