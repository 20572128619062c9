"""The offline interface under vLLM's module name: only re-exports."""
