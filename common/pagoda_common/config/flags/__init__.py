"""The configuration as flags, environment variables and YAML, in both directions. Starts nothing."""
