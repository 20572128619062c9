"""The served model, under the names of vLLM's ModelConfig. Knows no connection."""

from dataclasses import dataclass
from typing import Self

from pagoda.v1 import types_pb2
from pagoda_common.config.engine_config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModelConfig:
    """The model that an engine has loaded."""

    model: str
    """Directory or hub id."""
    tokenizer: str
    """Directory or hub id of the tokenizer."""
    served_model_name: str
    """Name that clients use."""
    dtype: str
    """Data type of the weights: float32, bfloat16 or float16."""
    max_model_len: int
    """Longest prompt plus output, tokens."""
    vocab_size: int
    """Tokens that may be sampled."""
    hidden_size: int
    """Values of an embedding; 0 where the model does not embed."""
    seed: int

    @classmethod
    def of(cls, info: types_pb2.ModelInfo, config: ModelConfig) -> Self:
        """From the engine's report and the requested configuration."""
        return cls(
            model=info.model,
            tokenizer=config.tokenizer or info.model,
            served_model_name=next(iter(config.served_model_name), info.model),
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            hidden_size=info.embedding_size,
            seed=config.seed,
        )

    def get_vocab_size(self) -> int:
        """vocab_size."""
        return self.vocab_size

    @property
    def embedding_size(self) -> int:
        """hidden_size."""
        return self.hidden_size

    def get_hidden_size(self) -> int:
        """hidden_size."""
        return self.hidden_size
