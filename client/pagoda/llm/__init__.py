"""LLM and AsyncLLM: the library's interface. Imports no service."""
