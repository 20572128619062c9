"""One configuration, from flags, variables and files. Starts nothing."""
