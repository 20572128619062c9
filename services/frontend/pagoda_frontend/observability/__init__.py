"""The frontend's metrics and traces. Decides nothing."""
