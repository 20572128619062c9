"""PoolingParams: how a prompt is pooled instead of continued. Knows no models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.sampling_params import SamplingParams

PoolingTask: TypeAlias = Literal["embed", "token_embed", "classify", "token_classify", "score", "sparse"]
"""embed: one vector. token_embed: one for each token. classify: a value for each label. token_classify: the same for
each token. score: one value, of a text or of a pair. sparse: a weight for each entry of the vocabulary."""
TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
MAX_DIMENSIONS = 1 << 20
PAIR_LIMITS = ("max_tokens_per_query", "max_tokens_per_doc")
"""vLLM's names for what is kept of the texts of a pair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """Parameters of a prompt that is pooled instead of continued."""

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
    extra_kwargs: Mapping[str, Any] | None = None
    """vLLM's: max_tokens_per_query and max_tokens_per_doc, what LLM.score keeps of each query and document."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest when a value is out of its bounds."""
        if self.task is not None and self.task not in TASKS:
            raise InvalidRequest(f"task is {self.task!r}, must be one of {', '.join(TASKS)}", field="task")
        for name in self.extra_kwargs or ():
            if name not in PAIR_LIMITS:
                raise InvalidRequest(f"extra_kwargs has {name[:40]!r}, which is not known", field="extra_kwargs")
        for name in PAIR_LIMITS:
            if self._limit(name) < 0:
                told = f"{name} must be a non-negative integer, got {self._limit(name)}"
                raise InvalidRequest(told, field="extra_kwargs")
        size = self.dimensions
        if size is not None and not 1 <= size <= MAX_DIMENSIONS:
            raise InvalidRequest(f"dimensions is {size}, must be between 1 and {MAX_DIMENSIONS}", field="dimensions")

    @property
    def max_document_tokens(self) -> int:
        """Tokens that are kept of the second text of a pair; 0: all."""
        return self._limit("max_tokens_per_doc")

    @property
    def max_query_tokens(self) -> int:
        """Tokens that are kept of the first text of a pair; 0: all."""
        return self._limit("max_tokens_per_query")

    def _limit(self, name: str) -> int:
        return int((self.extra_kwargs or {}).get(name) or 0)

    @property
    def normalizes(self) -> bool | None:
        """`normalize`, under either of its names."""
        return self.use_activation if self.normalize is None else self.normalize


def task_refusal(task: str, tasks: Sequence[str], unserved: Sequence[str] = ()) -> InvalidRequest:
    """Why a model that does `tasks` is not asked for another one; vLLM's words come first: programs look for them.

    Args:
        unserved: tasks that it does under another pooler config.
    """
    can = f"it can {', '.join(tasks)}" if tasks else "it can only generate"
    if task == "plugin":
        return InvalidRequest(
            f"No IOProcessor plugin installed. There are none for Pagoda; of this model, {can}.", field="task"
        )
    if task in unserved:
        told = f'Try switching the model\'s pooling_task via --pooler-config \'{{"task": "{task}"}}\''
        return InvalidRequest(f"{told}: now {can}.", field="task")
    if task == "score":
        why = _LABELLED if "classify" in tasks else "This model does not support the Scoring API"
        return InvalidRequest(f"Unsupported task: 'score'. {why}: {can}.", field="task")
    return InvalidRequest(
        f"Unsupported task: {task[:40]!r}. {_API.get(task, 'It')} is not supported by this model: {can}.", field="task"
    )


_API = {
    "embed": "Embedding API",
    "token_embed": "Embedding API",
    "classify": "Classification API",
    "token_classify": "Classification API",
}
_LABELLED = "Scoring API is only enabled for num_labels == 1"

POOLED = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
"""Sampling parameters of a pooling request, which have no effect: its result takes the place of one token."""
