"""Constraints on output: from schemas and grammars to a matcher. Knows no gRPC."""
