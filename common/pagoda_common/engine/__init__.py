"""The client side of the engine: sessions, streams and text. Knows no HTTP."""
