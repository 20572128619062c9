"""Log probabilities of tokens, where vLLM has them."""

from pagoda_common.params.outputs import Logprob

__all__ = ["Logprob"]
