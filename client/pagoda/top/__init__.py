"""`pagoda top`: an engine's figures in a terminal."""
