"""From what a client asks to requests of the engine, and their outputs. Knows no shape of an API."""
