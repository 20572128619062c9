"""The results of LLM.get_metrics, under the module name of vLLM's V1."""

from pagoda.llm.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
