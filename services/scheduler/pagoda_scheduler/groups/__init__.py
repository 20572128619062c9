"""Worker groups from registration to loss, and operators' commands to them. Knows no policy."""
