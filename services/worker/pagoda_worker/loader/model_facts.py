"""ModelFacts: properties of the loaded model."""

from dataclasses import dataclass

from pagoda_common.params.pooling_params import PoolingTask


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The loaded model."""

    model: str
    """Directory or hub id that it was loaded from."""
    architecture: str
    dtype: str
    """float32, bfloat16 or float16."""
    vocab_size: int
    """Columns of the logits."""
    max_model_len: int
    """Maximum length of prompt plus output, in tokens."""
    num_layers: int
    eos_token_ids: tuple[int, ...]
    generation_config_json: str
    num_parameters: int
    weight_bytes: int
    quantization: str = ""
    """Quantization of its matrices: a scheme such as int4-g128, or the checkpoint's method; empty: floats."""
    embedding_size: int = 0
    """Length of an embedding."""
    pooling_tasks: tuple[PoolingTask, ...] = ()
    """Pooling tasks, the default first."""
    unserved_pooling_tasks: tuple[PoolingTask, ...] = ()
    """Tasks that the pooler config leaves out."""
    only_pools: bool = False
    """Whether the model generates no tokens."""
    labels: tuple[str, ...] = ()
    """Labels of a classification model."""
    matryoshka: tuple[int, ...] | None = None
    """Lengths to which embeddings may be shortened; empty: any length; None: not at all."""
