"""One client's connection: HTTP/1.1, bounds on what may arrive, its end, its certificates. Knows no endpoint."""
