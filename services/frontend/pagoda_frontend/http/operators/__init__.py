"""Endpoints of operators, probes and pages: health, metrics, sleep mode, adapters, status. Generates nothing."""
