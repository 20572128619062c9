"""The engine's names where vLLM has them: re-exports, no code of its own."""
