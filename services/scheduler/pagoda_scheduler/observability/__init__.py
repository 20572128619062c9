"""Metrics and traces of steps and requests. Decides nothing."""
