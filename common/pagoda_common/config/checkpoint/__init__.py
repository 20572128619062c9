"""Files of a checkpoint before it is loaded: their location, format and defaults. Reads no weights."""
