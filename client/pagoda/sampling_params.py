"""Parameters of generation, under vLLM's module names."""

from pagoda import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
