"""Shapes of prompts, where vLLM has them."""

from pagoda import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
