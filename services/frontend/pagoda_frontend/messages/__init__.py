"""Anthropic's Messages API over a conversation. Knows no gRPC."""
