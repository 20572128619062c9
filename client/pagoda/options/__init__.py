"""Options of LLM and of the engine, with vLLM's names. Starts nothing."""
