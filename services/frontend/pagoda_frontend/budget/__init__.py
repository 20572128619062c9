"""Limits on a request before it is admitted: size, memory and time. Knows no endpoint."""
