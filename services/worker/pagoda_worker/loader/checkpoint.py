"""Checkpoint: the files of a model on disk (downloaded from the hub if needed) and its parsed configuration."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda_common.config.checkpoint.generation_config import parse_object
from pagoda_common.config.checkpoint.model_files import resolve_model, usual_form, why_no_config
from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.errors import ModelLoadError
from pagoda_common.text.tokenizer_files import TokenizerFiles
from pagoda_worker.loader.config_bounds import check_config
from pagoda_worker.pooling.pooling_files import NO_FILES, PoolingFiles, read_pooling_files

logger = logging.getLogger(__name__)

HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*_linear.pt", "*_Dense/pytorch_model.bin"]
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A model directory. Weight files are looked up lazily, because dummy weights need none."""

    directory: Path
    config: dict[str, Any]
    """config.json."""
    generation_config: dict[str, Any] | None
    """generation_config.json; None when there is none."""
    generation_config_json: str
    """The text of generation_config.json; empty if there is none."""
    tokenizer_eos_token_id: int | None = None
    """The tokenizer's eos_token; None where its files name none."""
    pooling: PoolingFiles = NO_FILES
    """The pooling of sentence-transformers' files."""

    @property
    def eos_token_ids(self) -> list[int]:
        """End tokens of generation_config.json, config.json and the tokenizer together, ascending."""
        ids: set[int] = set()
        for value in (
            (self.generation_config or {}).get("eos_token_id"),
            self.config.get("eos_token_id"),
            self.tokenizer_eos_token_id,
        ):
            values = value if isinstance(value, list) else [value]
            ids.update(token_id for token_id in values if isinstance(token_id, int))
        return sorted(ids)

    @property
    def dtype_name(self) -> str | None:
        """Data type that config.json names."""
        name = self.config.get("dtype") or self.config.get("torch_dtype")
        return str(name).removeprefix("torch.") if name else None

    def weight_files(self) -> list[Path]:
        """The safetensors files, or the GGUF file (its parts in order).

        Raises:
            ModelLoadError: there are none, or the index names a missing file.
        """
        index = self.directory / INDEX_FILE
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelLoadError(f"{index} has no weight_map")
            names = list(weight_map.values())
            for name in names:
                if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                    raise ModelLoadError(f"{index} names {str(name)[:200]!r}, must be files of the same directory")
            paths = [self.directory / name for name in sorted(set(names))]
            missing = [path.name for path in paths if not path.is_file()]
            if missing:
                raise ModelLoadError(f"{index} names files that are not there: {', '.join(missing)}")
            return paths
        if self.config.get("quantization_config") == {"quant_method": "gguf"}:
            return sorted(self.directory.glob("*.gguf"))
        paths = sorted(self.directory.glob("*.safetensors"))
        if (self.directory / "model.safetensors") in paths:
            return [self.directory / "model.safetensors"]
        if not paths:
            others = sorted(path.name for path in self.directory.glob("*.bin"))
            hint = f" (found {', '.join(others)}: pickled weights are not read)" if others else ""
            raise ModelLoadError(f"{self.directory} has no *.safetensors{hint}")
        return paths


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """Find the model and read its configuration.

    Raises:
        ModelLoadError: there is no such directory or hub id, config.json is missing or not a JSON object, or the
        pooling is not known.
    """
    place = resolve_model(config.model)
    directory = place if isinstance(place, Path) else _download(config)
    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{directory} {why_no_config(directory)}")
    generation_path = directory / "generation_config.json"
    has_generation = generation_path.is_file()
    values = _read_json(path) | parse_object(config.hf_overrides, field="hf_overrides")
    check_config(values)
    return Checkpoint(
        directory=directory,
        config=values,
        generation_config=_read_json(generation_path) if has_generation else None,
        generation_config_json=generation_path.read_text(encoding="utf-8") if has_generation else "",
        pooling=read_pooling_files(directory),
        tokenizer_eos_token_id=TokenizerFiles.read(directory).find_token_id("eos_token"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _download(config: ModelConfig) -> Path:
    # Imported here: most starts never need the hub, and its HTTP stack takes a moment to import.
    from huggingface_hub import snapshot_download

    logger.info("downloading %s from the hub", config.model)
    try:
        patterns = (
            ["config.json", "modules.json", "sentence_*_config.json", "*_*/config.json"]
            if config.load_format == "dummy"
            else HUB_PATTERNS
        )
        return usual_form(Path(snapshot_download(config.model, revision=config.revision, allow_patterns=patterns)))
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"model {config.model!r} is neither a directory nor could it be fetched from the hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            field="model",
        ) from error
