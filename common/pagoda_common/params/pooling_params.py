"""PoolingParams: what is made of a prompt instead of an output. Knows nothing of models."""

from dataclasses import dataclass

from pagoda_common.params.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """A prompt's embedding: the final hidden state of its last token, of which all others are seen."""

    normalize: bool = True
    """Divide it by its Euclidean length, so that a dot product of two is their cosine."""


POOLED = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
"""Of a request with pooling, whose sampling parameters mean nothing: its embedding takes the place of one token."""
