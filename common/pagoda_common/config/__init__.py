"""The configuration, from flags, environment variables and files. Starts nothing."""
