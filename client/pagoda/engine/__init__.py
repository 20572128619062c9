"""The engine's names under vLLM's module names: re-exports, no code of its own."""
