"""OpenAI's API besides Responses: bodies, handlers and chunks. Starts no requests by itself."""
