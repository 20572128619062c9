"""Shapes of prompts, under vLLM's module names."""

from pagoda import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
