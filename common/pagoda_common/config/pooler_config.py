"""PoolerConfig: the operator's options for pooling, with the keys of vLLM's --pooler-config. Knows no model."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from pagoda_common.config.checkpoint.generation_config import parse_object
from pagoda_common.errors import ConfigError
from pagoda_common.params.pooling_params import TASKS, PoolingTask

PoolingType: TypeAlias = Literal["last", "cls", "mean", "max", "mean_sqrt_len", "weightedmean", "all", "step"]
"""Pooling of a sequence's hidden states. last, cls: that of the last or first token. mean, max: their mean or maximum.
mean_sqrt_len: their sum over the root of their number. weightedmean: their mean with weights 1, 2, 3, … all: one per
token. step: those of one token."""
POOLING_TYPES: tuple[PoolingType, ...] = get_args(PoolingType)
_IGNORED = ("logit_bias", "logit_mean", "logit_sigma", "head_dtype")
"""Keys of vLLM that are refused when they ask for something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolerConfig:
    """Overrides the checkpoint's files; None: the files decide."""

    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    """Whether embeddings are divided by their length."""
    use_activation: bool | None = None
    """Whether scores and labels pass softmax or sigmoid."""
    dimensions: int | None = None
    """Values that embeddings are shortened to."""
    step_tag_id: int | None = None
    """With step: the token whose values are given."""
    returned_token_ids: tuple[int, ...] = ()
    """With step: the columns that are given; none gives all."""
    task: PoolingTask | None = None
    """The only one that is served; None: all that the checkpoint is made for."""
    splits_long: bool = False
    """Texts that are longer than the model takes are embedded in pieces (vLLM: enable_chunked_processing)."""


def pooler_config(text: str) -> PoolerConfig:
    """The config in a JSON object; "" leaves all to the checkpoint.

    Raises:
        ConfigError: it is no object, has a key that is not known, or a value out of its bounds.
    """
    given = parse_object(text, field="pooler_config")
    kind = next((given.pop(name) for name in ("seq_pooling_type", "tok_pooling_type") if given.get(name)), None)
    kind = given.pop("pooling_type", None) or kind
    given.pop("tok_pooling_type", None)
    given.pop("seq_pooling_type", None)
    normalize = given.pop("normalize", None)
    activation = given.pop("use_activation", None)
    activation = activation if activation is not None else given.pop("softmax", given.pop("activation", None))
    for name in _IGNORED:
        if given.pop(name, None):
            raise ConfigError(f"pooler_config has {name}, which is not supported", field="pooler_config")
    step_tag_id, returned = given.pop("step_tag_id", None), given.pop("returned_token_ids", None)
    dimensions, task = given.pop("dimensions", None), given.pop("task", None)
    splits_long = _switch("enable_chunked_processing", given.pop("enable_chunked_processing", None))
    _count("max_embed_len", given.pop("max_embed_len", None), least=1)
    if given:
        raise ConfigError(f"pooler_config has {next(iter(given))!r}, which is not known", field="pooler_config")
    return PoolerConfig(
        pooling_type=_pooling_type(kind),
        normalize=_switch("normalize", normalize if normalize is not None else activation),
        use_activation=_switch("use_activation", activation),
        dimensions=_count("dimensions", dimensions, least=1),
        step_tag_id=_count("step_tag_id", step_tag_id, least=0),
        returned_token_ids=_ids(returned),
        task=_task(task),
        splits_long=bool(splits_long),
    )


def _pooling_type(value: Any) -> PoolingType | None:
    if value is None:
        return None
    name = str(value).lower()
    if name not in POOLING_TYPES:
        raise _wrong("pooling_type", value, "one of " + ", ".join(POOLING_TYPES))
    return name


def _task(value: Any) -> PoolingTask | None:
    if value is None:
        return None
    if value not in TASKS:
        raise _wrong("task", value, "one of " + ", ".join(TASKS))
    return value  # type: ignore[no-any-return]  # JSON is Any; it is one of TASKS


def _switch(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _count(name: str, value: Any, *, least: int) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise _wrong(name, value, f"a whole number of at least {least}")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or any(_count("returned_token_ids", one, least=0) is None for one in value):
        raise _wrong("returned_token_ids", value, "a list of token ids")
    return tuple(value)


def _wrong(name: str, value: Any, bound: str) -> ConfigError:
    return ConfigError(f"pooler_config has {name} {str(value)[:100]!r}, must be {bound}", field="pooler_config")
