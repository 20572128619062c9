"""Decode steps recorded once and replayed with one launch. No requests, no gRPC."""
