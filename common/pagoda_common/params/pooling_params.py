"""PoolingParams: what is made of a prompt instead of an output. Knows nothing of models."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.sampling_params import SamplingParams

PoolingTask: TypeAlias = Literal["embed", "token_embed", "classify", "token_classify", "score", "sparse"]
"""embed: one vector. token_embed: one for each token. classify: a value for each label. token_classify: the same for
each token. score: one value, of a text or of a pair. sparse: a weight for each entry of the vocabulary."""
TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
MAX_DIMENSIONS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """What a prompt is computed for, when it is no text."""

    normalize: bool | None = None
    """Divide embeddings by their Euclidean length, so that a dot product of two is their cosine. None: as the
    checkpoint's files say; where they say nothing, they are."""
    task: PoolingTask | None = None
    """None: the model's first one."""
    dimensions: int | None = None
    """Keep this many values of an embedding, the first ones (Matryoshka); they are normalised afterwards. None: all."""
    use_activation: bool | None = None
    """Whether scores and labels pass the model's activation, softmax or sigmoid; False gives logits. None: yes. Of
    embeddings it is vLLM's name for normalize."""
    second_text_start: int = 0
    """First token of the second text of a pair, for models whose tokens have a type; 0: there is one text."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest when a value is out of its bounds."""
        if self.task is not None and self.task not in TASKS:
            raise InvalidRequest(f"task is {self.task!r}, must be one of {', '.join(TASKS)}", field="task")
        size = self.dimensions
        if size is not None and not 1 <= size <= MAX_DIMENSIONS:
            raise InvalidRequest(f"dimensions is {size}, must be between 1 and {MAX_DIMENSIONS}", field="dimensions")

    @property
    def normalizes(self) -> bool | None:
        """`normalize`, under either of its names."""
        return self.use_activation if self.normalize is None else self.normalize


POOLED = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
"""Of a request with pooling, whose sampling parameters mean nothing: its embedding takes the place of one token."""
