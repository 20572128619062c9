"""The engine as its clients see it: sessions, streams and text. Knows no HTTP."""
