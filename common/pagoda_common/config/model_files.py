"""Where a model's files are: the embedded model, a directory, or a name on the model hub; how long its context is."""

import contextlib
import json
from dataclasses import fields, replace
from pathlib import Path

from pagoda_common.config.engine_config import EMBEDDED_MODEL, ModelConfig, SchedulerConfig
from pagoda_common.errors import ModelLoadError

_EMBEDDED = Path(__file__).parents[1] / "models"


def resolve_model(name: str) -> Path | str:
    """The directory of a model that is on this machine, else the hub id.

    Raises:
        ModelLoadError: `name` is plainly a path, and there is no such directory.
    """
    if name == EMBEDDED_MODEL:
        return _EMBEDDED / EMBEDDED_MODEL
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"model {name!r} is not a directory", field="model")
    return name


def context_of(name: str) -> int | None:
    """max_position_embeddings of a checkpoint on this machine; None where that is not known."""
    with contextlib.suppress(ModelLoadError, OSError, ValueError, AttributeError, RecursionError):
        path = resolve_model(name)
        if isinstance(path, Path):
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            length = config.get("max_position_embeddings") or config.get("text_config", {}).get(
                "max_position_embeddings"
            )
            return length if isinstance(length, int) else None
    return None


def with_room_for_prompts(scheduler: SchedulerConfig, model: ModelConfig) -> SchedulerConfig:
    """`scheduler`; without chunked prefill a budget that was not given is raised to max_model_len, as in vLLM: a prompt
    runs in one step."""
    default = next(field.default for field in fields(SchedulerConfig) if field.name == "max_num_batched_tokens")
    if scheduler.enable_chunked_prefill or scheduler.max_num_batched_tokens != default:
        return scheduler
    longest = model.fixed_max_model_len or context_of(model.model) or 0
    return replace(scheduler, max_num_batched_tokens=max(longest, scheduler.max_num_batched_tokens))
