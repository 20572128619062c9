"""Parsers of models' tool calls, by family. Plugins derive from `ToolParser` and call `register_tool_parser`."""

from pagoda_frontend.tool_parsers.base import Piece, ToolParser, find_marker
from pagoda_frontend.tool_parsers.registry import register_tool_parser

__all__ = ["Piece", "ToolParser", "find_marker", "register_tool_parser"]
