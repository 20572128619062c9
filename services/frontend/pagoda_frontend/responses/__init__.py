"""OpenAI's Responses API over a conversation. Knows no gRPC."""
