"""Turns clients' requests into engine requests, and collects their outputs. Knows no API's shape."""
