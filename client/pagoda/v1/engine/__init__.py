"""The engine's names where vLLM's V1 has them: re-exports, no code of its own."""
