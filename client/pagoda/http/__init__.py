"""Calls of a server over HTTP, for commands, batches and benchmarks."""
