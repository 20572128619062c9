"""The location of a model's files (the embedded model, a directory, or a hub id), and the length of its context."""

import contextlib
import json
import re
from dataclasses import fields, replace
from pathlib import Path

from pagoda_common.config.engine_config import EMBEDDED_MODEL, ModelConfig, SchedulerConfig
from pagoda_common.errors import ModelLoadError

_LATER_PART = re.compile(r"-(?!00001-of)\d{5}-of-\d{5}\.gguf$")
_EMBEDDED = Path(__file__).parents[2] / "models"


def resolve_model(name: str) -> Path | str:
    """The directory of a model that is on this machine, else the hub id.

    A GGUF file, and a directory of one or of Mistral's files without config.json, becomes another directory first.

    Raises:
        ModelLoadError: `name` is plainly a path, and there is no such directory or file; a GGUF file is damaged.
    """
    if name == EMBEDDED_MODEL:
        return _EMBEDDED / EMBEDDED_MODEL
    path = Path(name).expanduser()
    if path.is_dir():
        return usual_form(path)
    if path.is_file() and path.suffix == ".gguf":
        return _of_gguf(path)
    if path.suffix == ".gguf":
        raise ModelLoadError(f"model {name!r} is not a file", field="model")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"model {name!r} is not a directory", field="model")
    return name


def usual_form(directory: Path) -> Path:
    """A directory that has config.json, where it can be made of what there is: of a GGUF file, or of Mistral's files.

    Raises:
        ModelLoadError: these are damaged, or not supported.
    """
    if (directory / "params.json").is_file() and not (directory / "config.json").exists():
        from pagoda_common.mistral.params import mistral_directory  # few starts need it

        return mistral_directory(directory)
    found = _only_gguf(directory)
    return directory if found is None else _of_gguf(found)


def why_no_config(directory: Path) -> str:
    """Describe a directory without config.json: the end of a sentence that begins with its name."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        adapter = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        base = str(adapter.get("base_model_name_or_path"))[:200]
        return f"is an adapter and no model (it has an adapter_config.json): serve its base model, {base!r}"
    return "has no config.json: it is not a checkpoint"


def _only_gguf(directory: Path) -> Path | None:
    """The GGUF file, or the first part of one, of a directory that has nothing else."""
    if (directory / "config.json").exists():
        return None
    files = sorted(path for path in directory.glob("*.gguf") if not _LATER_PART.search(path.name))
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:8])
        raise ModelLoadError(
            f"model {str(directory)!r} has several GGUF files, name one of them: {names}", field="model"
        )
    return files[0] if files else None


def _of_gguf(path: Path) -> Path:
    from pagoda_common.gguf.directory import gguf_directory  # the tokenizers library, which few starts need here

    return gguf_directory(path)


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
