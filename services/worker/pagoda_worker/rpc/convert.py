"""Converts messages of pagoda.v1.Worker to domain types and back. Pure functions."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pagoda.v1 import types_pb2, worker_pb2
from pagoda_common.config.engine_config import (
    FIT_MEMORY,
    ActivationQuantization,
    AttentionBackend,
    CacheConfig,
    Convert,
    Device,
    DType,
    EngineConfig,
    KVCacheDType,
    LoadFormat,
    LogprobsMode,
    ModelConfig,
    ModelImpl,
    Runner,
    SchedulerConfig,
)
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.engine.convert import POOLING_TASKS, pooling_params_from_proto, sampling_params_from_proto
from pagoda_common.errors import InvalidRequest, PagodaError
from pagoda_worker.loader.model_facts import ModelFacts
from pagoda_worker.models.cache_groups import CacheGroup, CacheKind
from pagoda_worker.steps.step import (
    NO_BLOCKS,
    NO_INTS,
    NO_PAIRS,
    BadSlot,
    IntArray,
    LogprobColumns,
    NewRequest,
    StepInput,
    StepOutput,
)


def engine_config_from_proto(message: worker_pb2.WorkerConfig) -> EngineConfig:
    """The part of the engine's configuration that a worker uses; the rest keeps its defaults.

    Raises:
        ConfigError: a value is out of its bounds; `field` names it.
    """
    return EngineConfig(
        model=ModelConfig(
            model=message.model,
            revision=message.revision or None,
            dtype=cast("DType", message.dtype or "auto"),
            quantization=message.quantization or None,
            activation_quantization=cast("ActivationQuantization", message.activation_quantization or "auto"),
            device=cast("Device", message.device or "auto"),
            max_model_len=FIT_MEMORY if message.fits_max_model_len else message.max_model_len or None,
            load_format=cast("LoadFormat", message.load_format or "auto"),
            max_logprobs=message.max_logprobs,
            logprobs_mode=cast("LogprobsMode", message.logprobs_mode or "raw_logprobs"),
            logits_processors=tuple(message.logits_processors),
            reference_kernels=tuple(message.reference_kernels),
            attention_backend=cast("AttentionBackend", message.attention_backend or "auto"),
            enforce_eager=message.enforce_eager,
            model_impl=cast("ModelImpl", message.model_impl or "auto"),
            runner=cast("Runner", message.runner or "auto"),
            convert=cast("Convert", message.convert or "auto"),
            pooler_config=message.pooler_config,
            hf_overrides=message.hf_overrides,
            seed=message.seed,
        ),
        cache=CacheConfig(
            block_size=message.block_size,
            kv_cache_memory_bytes=message.kv_cache_memory_bytes or None,
            gpu_memory_utilization=message.gpu_memory_utilization,
            cpu_kv_cache_memory_bytes=message.cpu_kv_cache_memory_bytes,
            kv_cache_dtype=cast("KVCacheDType", message.kv_cache_dtype or "auto"),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=message.max_num_seqs, max_num_batched_tokens=message.max_num_batched_tokens
        ),
        speculative=_speculative_config(message),
        lora=_lora_config(message),
    )


def _speculative_config(message: worker_pb2.WorkerConfig) -> SpeculativeConfig:
    if not message.HasField("speculative"):
        return SpeculativeConfig()
    given = message.speculative
    return SpeculativeConfig(
        method=given.method,
        num_speculative_tokens=given.num_speculative_tokens,
        prompt_lookup_max=given.prompt_lookup_max,
        prompt_lookup_min=given.prompt_lookup_min,
    )


def _lora_config(message: worker_pb2.WorkerConfig) -> LoraConfig:
    if not message.HasField("lora"):
        return LoraConfig()
    given = message.lora
    return LoraConfig(
        enable_lora=True,
        max_loras=given.max_loras,
        max_lora_rank=given.max_lora_rank,
        max_cpu_loras=given.max_cpu_loras,
        lora_target_modules=tuple(given.target_modules),
    )


_CACHE_KINDS: dict[CacheKind, types_pb2.CacheKind] = {
    "full": types_pb2.CACHE_KIND_FULL,
    "latent": types_pb2.CACHE_KIND_FULL,  # blocks come and go as those of keys and values
    "window": types_pb2.CACHE_KIND_WINDOW,
    "recurrent": types_pb2.CACHE_KIND_RECURRENT,
    "none": types_pb2.CACHE_KIND_NONE,
}


def model_facts_to_proto(facts: ModelFacts, groups: Sequence[CacheGroup] = ()) -> types_pb2.ModelInfo:
    """ModelInfo for all services. `groups`: of its layers by kept data; empty if all keep every token."""
    return types_pb2.ModelInfo(
        model=facts.model,
        architecture=facts.architecture,
        dtype=facts.dtype,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        num_layers=facts.num_layers,
        eos_token_ids=facts.eos_token_ids,
        generation_config_json=facts.generation_config_json,
        num_parameters=facts.num_parameters,
        weight_bytes=facts.weight_bytes,
        quantization=facts.quantization,
        embedding_size=facts.embedding_size,
        pooling_tasks=[POOLING_TASKS[task] for task in facts.pooling_tasks],
        unserved_pooling_tasks=[POOLING_TASKS[task] for task in facts.unserved_pooling_tasks],
        only_pools=facts.only_pools,
        labels=facts.labels,
        has_matryoshka=facts.matryoshka is not None,
        matryoshka_dimensions=facts.matryoshka or (),
        cache_groups=[
            types_pb2.CacheGroup(kind=_CACHE_KINDS[group.kind], num_layers=len(group.layers), window=group.window or 0)
            for group in groups
        ],
    )


def step_input_from_proto(message: worker_pb2.ExecuteModelRequest, *, arrived_ns: int = 0) -> StepInput:
    """One step. A new request that cannot be read is rejected by itself.

    Raises:
        InvalidRequest: a column's length is not a multiple of its entries'.
    """
    new_requests, rejected = [], []
    for new in message.new_requests:
        try:
            new_requests.append(_new_request(new))
        except PagodaError as error:
            rejected.append(BadSlot(slot=new.slot, code=error.code, message=error.message, field=error.field or ""))
    return StepInput(
        freed_slots=_column(message.freed_slots, "<u2", "freed_slots"),
        blocks_to_swap_out=_pairs(message.blocks_to_swap_out, "blocks_to_swap_out"),
        blocks_to_swap_in=_pairs(message.blocks_to_swap_in, "blocks_to_swap_in"),
        blocks_to_copy=_pairs(message.blocks_to_copy, "blocks_to_copy"),
        states_to_swap_out=_pairs(message.states_to_swap_out, "states_to_swap_out"),
        states_to_swap_in=_pairs(message.states_to_swap_in, "states_to_swap_in"),
        states_to_load=_pairs(message.states_to_load, "states_to_load"),
        states_to_save=_pairs(message.states_to_save, "states_to_save"),
        loras_to_remove=_column(message.loras_to_remove, "<u4", "loras_to_remove"),
        new_requests=new_requests,
        rejected=rejected,
        appended_slots=_column(message.appended_slots, "<u2", "appended_slots"),
        appended_block_ids=_column(message.appended_block_ids, "<u4", "appended_block_ids"),
        appended_groups=_column(message.appended_groups, "<u1", "appended_groups"),
        num_seqs=message.num_seqs,
        slots=_column(message.slots, "<u2", "slots") if message.slots else None,
        num_scheduled_tokens=_column(message.num_scheduled_tokens, "<u4", "num_scheduled_tokens")
        if message.num_scheduled_tokens
        else None,
        num_lookahead_tokens=_lookahead(message),
        arrived_ns=arrived_ns,
    )


def _lookahead(message: worker_pb2.ExecuteModelRequest) -> IntArray | None:
    if message.num_lookahead_tokens:
        return _column(message.num_lookahead_tokens, "<u1", "num_lookahead_tokens")
    if message.num_lookahead_slots:
        return np.full(message.num_seqs, message.num_lookahead_slots, dtype=np.int64)
    return None


def _new_request(message: worker_pb2.NewRequest) -> NewRequest:
    block_ids = _column(message.block_ids, "<u4", "block_ids")
    return NewRequest(
        slot=message.slot,
        request_id=message.request_id,
        prompt_token_ids=_column(message.prompt_token_ids, "<u4", "prompt_token_ids"),
        output_token_ids=_column(message.output_token_ids, "<u4", "output_token_ids"),
        sampling_params=sampling_params_from_proto(message.sampling_params),
        block_ids=block_ids,
        group_block_ids=_group_blocks(message.group_block_ids, block_ids.size),
        num_computed_tokens=message.num_computed_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        is_beam=message.is_beam,
        pooling=pooling_params_from_proto(message.pooling) if message.HasField("pooling") else None,
        lora_number=message.lora_number,
    )


def _group_blocks(column: bytes, num_blocks: int) -> IntArray:
    if not column:
        return NO_BLOCKS
    values = _column(column, "<u4", "group_block_ids")
    if not num_blocks or values.size % num_blocks:
        raise InvalidRequest(
            f"group_block_ids has {values.size} entries, must be a multiple of block_ids, {num_blocks}",
            field="group_block_ids",
        )
    return values.reshape(-1, num_blocks)


def _column(column: bytes, dtype: str, field: str) -> IntArray:
    if not column:  # most columns of most steps
        return NO_INTS
    kind = np.dtype(dtype)
    if len(column) % kind.itemsize:
        raise InvalidRequest(f"{field} has {len(column)} bytes, must be a multiple of {kind.itemsize}", field=field)
    return np.frombuffer(column, dtype=kind).astype(np.int64)


def _pairs(column: bytes, field: str) -> IntArray:
    if not column:
        return NO_PAIRS
    values = _column(column, "<u4", field)
    if values.size % 2:
        raise InvalidRequest(f"{field} has {values.size} entries, must be pairs", field=field)
    return values.reshape(-1, 2)


def step_output_to_proto(output: StepOutput, request: worker_pb2.ExecuteModelRequest) -> worker_pb2.SamplerOutput:
    """The answer to `request`."""
    message = worker_pb2.SamplerOutput(
        session_epoch=request.session_epoch,
        worker_incarnation=request.worker_incarnation,
        step=request.step,
        token_ids=_bytes(output.token_ids, "<u4"),
        timings=worker_pb2.StepTimings(
            queue_ns=output.timings.queue_ns,
            prepare_ns=output.timings.prepare_ns,
            forward_ns=output.timings.forward_ns,
            sample_ns=output.timings.sample_ns,
        ),
    )
    if output.num_sampled_tokens is not None:
        message.num_sampled_tokens = _bytes(output.num_sampled_tokens, "<u1")
    if output.num_draft_tokens is not None:
        message.num_draft_tokens = _bytes(output.num_draft_tokens, "<u1")
    if output.logprobs is not None:
        message.logprobs.CopyFrom(_logprobs(output.logprobs))
    for chunk in output.prompt_logprobs:
        message.prompt_logprobs.add(slot=chunk.slot, start=chunk.start, logprobs=_logprobs(chunk.logprobs))
    if output.pooled is not None:
        message.pooled.slots = _bytes(output.pooled.slots, "<u2")
        message.pooled.values = b"".join(_bytes(one, "<f4") for one in output.pooled.values)
        counts = [one.size for one in output.pooled.values]
        if len(set(counts)) > 1:
            message.pooled.counts = _bytes(np.array(counts), "<u4")
    for bad in output.bad_slots:
        message.bad_slots.add(slot=bad.slot, code=int(bad.code), message=bad.message, field=bad.field)
    return message


def _logprobs(columns: LogprobColumns) -> types_pb2.LogprobColumns:
    return types_pb2.LogprobColumns(
        rows=_bytes(columns.rows, "<u4"),
        counts=_bytes(columns.counts, "<u4"),
        token_ids=_bytes(columns.token_ids, "<u4"),
        logprobs=_bytes(columns.logprobs, "<f4"),
        sampled_ranks=_bytes(columns.sampled_ranks, "<u4"),
    )


def _bytes(array: npt.NDArray[Any], dtype: str) -> bytes:
    return array.astype(np.dtype(dtype)).tobytes()
