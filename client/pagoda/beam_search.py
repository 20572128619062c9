"""The outputs of a beam search, under vLLM's module name."""

from pagoda.llm.beam_search import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
