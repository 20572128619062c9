"""Converts steps to worker messages, and results back. Pure functions."""

import time
from collections.abc import Sequence

import numpy as np

from pagoda.v1 import types_pb2, worker_pb2
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.engine.convert import (
    column,
    pooling_params_to_proto,
    sampling_params_to_proto,
    token_ids_to_bytes,
    weights_source_to_proto,
)
from pagoda_common.errors import ConfigError
from pagoda_scheduler.core.step import (
    BadSlot,
    LogprobRows,
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobRows,
    SchedulerOutput,
    StepTimings,
)
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheGroup, CacheKind

U32 = np.dtype("<u4")
F32 = np.dtype("<f4")


def worker_config_to_proto(config: EngineConfig) -> worker_pb2.WorkerConfig:
    """The part of the engine's configuration that a worker needs."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    message = worker_pb2.WorkerConfig(
        model=model.model,
        revision=model.revision or "",
        dtype=model.dtype,
        quantization=model.quantization or "",
        activation_quantization=model.activation_quantization,
        device=model.device,
        max_model_len=model.fixed_max_model_len or 0,
        fits_max_model_len=model.fits_max_model_len,
        block_size=cache.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes or 0,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        load_format=model.load_format,
        max_logprobs=model.max_logprobs,
        cpu_kv_cache_memory_bytes=cache.cpu_kv_cache_memory_bytes,
        seed=model.seed,
        logprobs_mode=model.logprobs_mode,
        logits_processors=model.logits_processors,
        reference_kernels=model.reference_kernels,
        attention_backend=model.attention_backend,
        enforce_eager=model.enforce_eager,
        model_impl=model.model_impl,
        runner=model.runner,
        convert=model.convert,
        pooler_config=model.pooler_config,
        hf_overrides=model.hf_overrides,
        kv_cache_dtype=cache.kv_cache_dtype,
        takes_cache_groups=True,
    )
    lora = config.lora
    if lora.enable_lora:
        message.lora.max_loras, message.lora.max_lora_rank = lora.max_loras, lora.max_lora_rank
        message.lora.max_cpu_loras = lora.num_host
        message.lora.target_modules.extend(lora.lora_target_modules)
    speculative = config.speculative
    if speculative.is_on:
        message.speculative.method = speculative.method
        message.speculative.num_speculative_tokens = speculative.num_speculative_tokens
        message.speculative.prompt_lookup_max = speculative.prompt_lookup_max
        message.speculative.prompt_lookup_min = speculative.prompt_lookup_min
    return message


def init_device_to_proto(
    config: EngineConfig, *, session_epoch: int, weights: WeightsSource | None, rendezvous_address: str = ""
) -> worker_pb2.InitDeviceRequest:
    """The first call to a worker."""
    message = worker_pb2.InitDeviceRequest(
        session_epoch=session_epoch,
        config=worker_config_to_proto(config),
        rendezvous_address=rendezvous_address,
    )
    if weights is not None:
        message.weights.CopyFrom(weights_source_to_proto(weights))
    return message


_KINDS: dict[types_pb2.CacheKind, CacheKind] = {
    types_pb2.CACHE_KIND_FULL: "full",
    types_pb2.CACHE_KIND_WINDOW: "window",
    types_pb2.CACHE_KIND_RECURRENT: "recurrent",
    types_pb2.CACHE_KIND_NONE: "none",
}


def cache_groups_from_proto(info: types_pb2.ModelInfo) -> tuple[CacheGroup, ...]:
    """The model's cache groups.

    Raises:
        ConfigError: this scheduler does not know a group's kind, because the worker is newer.
    """
    groups = []
    for index, message in enumerate(info.cache_groups):
        kind = _KINDS.get(message.kind)
        if kind is None:
            raise ConfigError(f"cache_groups[{index}].kind is {message.kind}, this scheduler knows {sorted(_KINDS)}")
        if (kind == "window") != (message.window > 0):
            bound = "at least 1" if kind == "window" else f"0 for kind {kind}"
            raise ConfigError(f"cache_groups[{index}].window is {message.window}, must be {bound}")
        groups.append(CacheGroup(kind, message.num_layers, message.window))
    return tuple(groups) or ONE_GROUP


class StepEncoder:
    """Makes ExecuteModelRequests; leaves out data that the worker knows from the step before."""

    def __init__(self, *, session_epoch: int, worker_incarnation: int) -> None:
        self._session_epoch = session_epoch
        self._worker_incarnation = worker_incarnation
        self._last_slots: list[int] = []

    def encode(self, output: SchedulerOutput) -> worker_pb2.ExecuteModelRequest:
        """`output` as a message."""
        message = worker_pb2.ExecuteModelRequest(
            session_epoch=self._session_epoch,
            worker_incarnation=self._worker_incarnation,
            step=output.step,
            num_seqs=len(output.slots),
        )
        if output.slots != self._last_slots:
            message.slots = column(output.slots, "<u2")
            self._last_slots = output.slots
        lookahead = output.num_lookahead_tokens
        if lookahead and any(lookahead):
            if min(lookahead) == max(lookahead):
                message.num_lookahead_slots = lookahead[0]
            else:
                message.num_lookahead_tokens = bytes(lookahead)
        if output.num_tokens != len(output.slots):
            message.num_scheduled_tokens = column(output.num_scheduled_tokens, "<u4")
        if output.new_requests:
            message.new_requests.extend(map(_new_request_to_proto, output.new_requests))
        if output.freed_slots:
            message.freed_slots = column(output.freed_slots, "<u2")
        if output.appended_slots:
            message.appended_slots = column(output.appended_slots, "<u2")
            message.appended_block_ids = column(output.appended_block_ids, "<u4")
            if output.appended_groups:
                message.appended_groups = bytes(output.appended_groups)
        if output.blocks_to_swap_out:
            message.blocks_to_swap_out = _pairs(output.blocks_to_swap_out)
        if output.blocks_to_swap_in:
            message.blocks_to_swap_in = _pairs(output.blocks_to_swap_in)
        if output.blocks_to_copy:
            message.blocks_to_copy = _pairs(output.blocks_to_copy)
        if output.states_to_load:
            message.states_to_load = _pairs(output.states_to_load)
        if output.states_to_save:
            message.states_to_save = _pairs(output.states_to_save)
        if output.states_to_swap_out:
            message.states_to_swap_out = _pairs(output.states_to_swap_out)
        if output.states_to_swap_in:
            message.states_to_swap_in = _pairs(output.states_to_swap_in)
        if output.loras_to_remove:
            message.loras_to_remove = column(output.loras_to_remove, "<u4")
        return message


def _pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    return column([number for pair in pairs for number in pair], "<u4")


def _new_request_to_proto(new: NewRequestData) -> worker_pb2.NewRequest:
    return worker_pb2.NewRequest(
        slot=new.slot,
        request_id=new.request_id,
        prompt_token_ids=token_ids_to_bytes(new.prompt_token_ids),
        output_token_ids=token_ids_to_bytes(new.output_token_ids),
        sampling_params=sampling_params_to_proto(new.sampling_params),
        block_ids=column(new.block_ids, "<u4"),
        num_computed_tokens=new.num_computed_tokens,
        eos_token_ids=new.eos_token_ids,
        is_beam=new.is_beam,
        pooling=pooling_params_to_proto(new.pooling) if new.pooling is not None else None,
        group_block_ids=b"".join(column(table, "<u4") for table in new.group_block_ids),
        lora_number=new.lora_number,
    )


def model_runner_output_from_proto(
    message: worker_pb2.SamplerOutput, *, encode_ns: int = 0, round_trip_ns: int = 0
) -> ModelRunnerOutput:
    """A worker's answer as plain data.

    Args:
        encode_ns, round_trip_ns: measured by the caller, for the timings.
    """
    started_ns = time.perf_counter_ns()
    in_worker = message.timings
    queue_ns, prepare_ns = in_worker.queue_ns, in_worker.prepare_ns
    forward_ns, sample_ns = in_worker.forward_ns, in_worker.sample_ns
    wire_ns = max(0, round_trip_ns - queue_ns - prepare_ns - forward_ns - sample_ns)
    counts, num_draft_tokens, bad_slots = message.num_sampled_tokens, message.num_draft_tokens, message.bad_slots
    token_ids = np.frombuffer(message.token_ids, dtype=U32).tolist()
    logprobs = logprob_rows_from_proto(message.logprobs) if message.HasField("logprobs") else None
    prompt_logprobs = [_prompt_logprobs(chunk) for chunk in chunks] if (chunks := message.prompt_logprobs) else []
    pooled = _embeddings(message.pooled) if message.HasField("pooled") else None
    decode_ns = time.perf_counter_ns() - started_ns
    return ModelRunnerOutput(
        step=message.step,
        num_sampled_tokens=list(counts) if counts else None,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        bad_slots=[BadSlot(bad.slot, bad.code, bad.message, bad.field) for bad in bad_slots] if bad_slots else [],
        num_draft_tokens=list(num_draft_tokens) if num_draft_tokens else None,
        pooled=pooled,
        timings=StepTimings(encode_ns, wire_ns, queue_ns, prepare_ns, forward_ns, sample_ns, decode_ns),
    )


def _prompt_logprobs(message: worker_pb2.PromptLogprobs) -> PromptLogprobRows:
    return PromptLogprobRows(message.slot, message.start, logprob_rows_from_proto(message.logprobs))


def _embeddings(message: worker_pb2.PooledColumns) -> dict[int, bytes]:
    """Embeddings by slot."""
    slots = np.frombuffer(message.slots, dtype="<u2").tolist()
    if message.counts:
        ends = np.cumsum(np.frombuffer(message.counts, dtype=U32), dtype=np.int64) * F32.itemsize
        starts = [0, *ends.tolist()]
        return {slot: message.values[starts[place] : starts[place + 1]] for place, slot in enumerate(slots)}
    size = len(message.values) // max(1, len(slots))
    return {slot: message.values[place * size : (place + 1) * size] for place, slot in enumerate(slots)}


def logprob_rows_from_proto(message: types_pb2.LogprobColumns) -> LogprobRows:
    """Columns as arrays over the message's memory."""
    return LogprobRows(
        rows=np.frombuffer(message.rows, dtype=U32),
        counts=np.frombuffer(message.counts, dtype=U32),
        token_ids=np.frombuffer(message.token_ids, dtype=U32),
        logprobs=np.frombuffer(message.logprobs, dtype=F32),
        sampled_ranks=np.frombuffer(message.sampled_ranks, dtype=U32),
    )
