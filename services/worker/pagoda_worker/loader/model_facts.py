"""ModelFacts: what is known of the model once it is loaded."""

from dataclasses import dataclass

from pagoda_common.params.pooling_params import PoolingTask


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The loaded model."""

    model: str
    """Directory or hub id it was loaded from."""
    architecture: str
    dtype: str
    """float32, bfloat16 or float16."""
    vocab_size: int
    """Columns of the logits."""
    max_model_len: int
    """Longest prompt plus output, tokens."""
    num_layers: int
    eos_token_ids: tuple[int, ...]
    generation_config_json: str
    num_parameters: int
    weight_bytes: int
    quantization: str = ""
    """How its matrices are held: a scheme such as int4-g128, or the method of its checkpoint; empty: as floats."""
    embedding_size: int = 0
    """Values of an embedding."""
    pooling_tasks: tuple[PoolingTask, ...] = ()
    """Pooling tasks, the default first."""
    unserved_pooling_tasks: tuple[PoolingTask, ...] = ()
    """Those that the pooler config leaves out."""
    only_pools: bool = False
    """It generates nothing."""
    labels: tuple[str, ...] = ()
    """Labels of the model."""
    matryoshka: tuple[int, ...] | None = None
    """Lengths to which embeddings may be shortened; empty: any length; None: not at all."""
