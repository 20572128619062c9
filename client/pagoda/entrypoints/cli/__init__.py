"""The command under vLLM's module name: ``python -m pagoda.entrypoints.cli.main``."""
