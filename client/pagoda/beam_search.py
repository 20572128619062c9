"""What a beam search gives, where vLLM has it."""

from pagoda.llm.beam_search import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
