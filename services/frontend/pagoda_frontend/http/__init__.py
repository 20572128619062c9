"""HTTP: the app, its connections, bodies, streams and errors. Knows no model and no engine's state."""
