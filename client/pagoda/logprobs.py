"""Log probabilities of tokens, under vLLM's module names."""

from pagoda_common.params.outputs import Logprob

__all__ = ["Logprob"]
