"""Prometheus metrics and traces for all services. Decides nothing."""
