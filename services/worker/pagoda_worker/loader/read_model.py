"""Reads a model: its configuration, its weights onto a device, and its properties. Knows no cache and no steps."""

import logging
import time
from dataclasses import dataclass

import torch

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.pooler_config import pooler_config
from pagoda_common.config.quantization import OnlineQuantization, parse_quantization
from pagoda_common.errors import ConfigError
from pagoda_common.process.startup_marks import mark
from pagoda_kernels.native.library import load_native
from pagoda_kernels.selection import use_references
from pagoda_worker.loader.build import ModelBuilder
from pagoda_worker.loader.checkpoint import Checkpoint, open_checkpoint
from pagoda_worker.loader.model_facts import ModelFacts
from pagoda_worker.loader.model_weights import ModelWeights, stored_quantization
from pagoda_worker.loader.weights import Progress
from pagoda_worker.memory.device import choose_dtype, reference_kernels
from pagoda_worker.models.model import BuildConfig, Model
from pagoda_worker.parallel.tensor_parallel import TensorParallel
from pagoda_worker.pooling.make_pooler import make_pooler, needs_weight_files
from pagoda_worker.pooling.pooler import Pooler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadModel:
    """One rank's."""

    model: Model
    weights: ModelWeights
    facts: ModelFacts
    dtype: torch.dtype
    """Data type of weights and activations."""
    pooler: Pooler


def read_model(
    config: EngineConfig,
    *,
    device: torch.device,
    parallel: TensorParallel,
    source: WeightsSource | None,
    progress: Progress,
) -> ReadModel:
    """Load the model of a config onto a device; this also chooses kernels for the process.

    Args:
        source: of the weights; None: the model's own checkpoint.

    Raises:
        ModelLoadError: the checkpoint cannot be served.
        ConfigError: max_model_len is more than the checkpoint was made for, or the ranks cannot share the model.
    """
    started = time.monotonic()
    if device.type == "cpu" and "all" not in config.model.reference_kernels:
        load_native()
        mark("load kernels")
    checkpoint = open_checkpoint(config.model)
    build_config = BuildConfig(checkpoint=checkpoint.config, engine=config.model, pooling=checkpoint.pooling)
    builder = ModelBuilder(config=build_config, parallel=parallel)
    model = builder.build()
    max_model_len = config.model.fixed_max_model_len or _stated(checkpoint) or _longest(model, checkpoint)
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_model_len}, the model was made for {model.max_position_embeddings} tokens",
            field="max_model_len",
        )
    stored = stored_quantization(config.model, checkpoint)
    online = parse_quantization(config.model.quantization)
    num_parameters = sum(parameter.numel() for parameter in builder.build_whole(model).parameters())
    dtype = choose_dtype(config.model.dtype, checkpoint.dtype_name, device=device, num_parameters=num_parameters)
    use_references(reference_kernels(config.model.reference_kernels, dtype, device))
    weights = ModelWeights(model=model, config=config.model, dtype=dtype, device=device, builder=builder)
    weights.reload(source, progress)
    mark("load weights")
    model.prepare(max_model_len=max_model_len, device=device)
    pooler = make_pooler(
        model=model,
        files=checkpoint.pooling,
        asked=pooler_config(config.model.pooler_config),
        checkpoint=checkpoint.config,
        directory=checkpoint.directory,
        weight_files=checkpoint.weight_files() if needs_weight_files(checkpoint.config) else (),
        device=device,
    )
    facts = ModelFacts(
        model=config.model.model,
        architecture=model.architecture,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        num_layers=model.num_layers,
        eos_token_ids=tuple(checkpoint.eos_token_ids),
        generation_config_json=checkpoint.generation_config_json,
        num_parameters=num_parameters,
        weight_bytes=weights.num_bytes,
        embedding_size=pooler.spec.num_values,
        pooling_tasks=pooler.spec.tasks,
        unserved_pooling_tasks=pooler.spec.unserved_tasks,
        only_pools=model.only_pools,
        labels=pooler.spec.labels,
        matryoshka=pooler.spec.matryoshka,
        quantization=online.name if isinstance(online, OnlineQuantization) else stored[0] if stored else "",
    )
    logger.info(
        "%s: %s, %.1f M parameters, %s, %d tokens of context, loaded in %.1f s",
        facts.model,
        facts.architecture,
        num_parameters / 1e6,
        facts.dtype,
        max_model_len,
        time.monotonic() - started,
    )
    return ReadModel(model=model, weights=weights, facts=facts, dtype=dtype, pooler=pooler)


def _stated(checkpoint: Checkpoint) -> int | None:
    """Tokens of context in config.json, which programs for vLLM set in hf_overrides together with a new rotation."""
    stated = checkpoint.config.get("max_model_len")
    return stated if isinstance(stated, int) and stated > 0 else None


def _longest(model: Model, checkpoint: Checkpoint) -> int:
    """Tokens of context: those that the model was made for, at most those that its embeddings were trained with."""
    longest = model.max_position_embeddings
    return min(longest, checkpoint.pooling.max_seq_length or longest) if model.only_pools else longest
