"""The offline interface where vLLM has it: re-exports, no code of its own."""
