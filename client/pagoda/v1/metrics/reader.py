"""What LLM.get_metrics gives, where vLLM's V1 has it."""

from pagoda.llm.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
