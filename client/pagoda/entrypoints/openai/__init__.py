"""The server's and the batches' modules under vLLM's module names: ``python -m``, no code of its own."""
