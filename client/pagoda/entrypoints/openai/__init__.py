"""The server's and the batches' modules where vLLM has them: ``python -m``, no code of its own."""
