"""The command where vLLM has it: ``python -m pagoda.entrypoints.cli.main``."""
