"""Worker groups from registration to loss, and what operators ask of them. Knows no policy."""
