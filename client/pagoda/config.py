"""Configuration objects under vLLM's module name: `LLM(pooler_config=PoolerConfig(task="token_embed"))`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pagoda_common.config.pooler_config import pooler_config

__all__ = ["PoolerConfig"]


@dataclass(kw_only=True)
class PoolerConfig:
    """How hidden states become vectors, labels or scores; None: as the checkpoint's files say.

    Raises:
        ConfigError: a value is out of its bounds or not supported.
    """

    task: str | None = None
    """The only task that is served; None: all that the checkpoint is made for."""
    pooling_type: str | None = None
    """CLS, LAST, MEAN, MAX, ALL, STEP and the other types of pagoda_common.config.pooler_config."""
    seq_pooling_type: str | None = None
    """vLLM's name for pooling_type where a text has one result."""
    tok_pooling_type: str | None = None
    """vLLM's name for pooling_type where each token has one: ALL or STEP."""
    normalize: bool | None = None
    """Whether embeddings are divided by their length."""
    use_activation: bool | None = None
    """Whether scores and labels pass softmax or sigmoid, and embeddings are normalised."""
    dimensions: int | None = None
    """Values that embeddings are shortened to."""
    enable_chunked_processing: bool | None = None
    """Whether texts that are longer than the model takes are embedded in pieces."""
    max_embed_len: int | None = None
    """Accepted: pieces have no such bound."""
    logit_mean: float | None = None
    """Refused."""
    logit_sigma: float | None = None
    """Refused."""
    step_tag_id: int | None = None
    """With STEP: the token whose values are given."""
    returned_token_ids: Sequence[int] | None = None
    """With STEP: the columns that are given."""

    def __post_init__(self) -> None:
        pooler_config(self.to_json())

    def to_json(self) -> str:
        """The value of --pooler-config."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(given | {name: list(given[name]) for name in ("returned_token_ids",) if name in given})
