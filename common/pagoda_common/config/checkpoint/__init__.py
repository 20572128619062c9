"""Files of a checkpoint before it is loaded: where they are, their form, their defaults. Reads no weights."""
