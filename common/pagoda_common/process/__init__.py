"""Processes: children, heartbeats, memory, logs, watched files. Knows no gRPC."""
