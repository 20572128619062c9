"""How answers are sent: event streams, long bodies in pieces, headers about load. Knows no endpoint."""
