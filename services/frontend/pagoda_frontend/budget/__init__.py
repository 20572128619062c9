"""What a request may cost before it is admitted: its size, its memory, the time it takes. Knows no endpoint."""
