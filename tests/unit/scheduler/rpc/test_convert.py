"""Steps as messages and back: every field of every message, found by reflection, so that a new one cannot be missed."""

import math
import struct
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagoda.v1 import types_pb2, worker_pb2
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.engine.convert import (
    pooling_params_from_proto,
    sampling_params_from_proto,
    token_ids_from_bytes,
    weights_source_from_proto,
)
from pagoda_common.errors import ConfigError
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.core.step import LogprobRows, NewRequestData, SchedulerOutput
from pagoda_scheduler.kv.cache_group import NO_BLOCK, CacheGroup
from pagoda_scheduler.rpc.convert import (
    StepEncoder,
    cache_groups_from_proto,
    init_device_to_proto,
    model_runner_output_from_proto,
    worker_config_to_proto,
)


def missing(message: Message, *, but: frozenset[str] = frozenset()) -> list[str]:
    """Fields of a message, and of the messages in it, that have their default."""
    names = []
    present = {field.name: value for field, value in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.name in but:
            continue
        value = present.get(field.name)
        if value is None:
            names.append(field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and isinstance(value, Message):
            names += [f"{field.name}.{name}" for name in missing(value, but=but)]
    return names


def integers(column: bytes, kind: str = "I") -> list[int]:
    return list(struct.unpack(f"<{len(column) // struct.calcsize(kind)}{kind}", column))


def output(**more: Any) -> SchedulerOutput:
    new = NewRequestData(
        slot=7,
        request_id="a/1",
        prompt_token_ids=list(range(300)),
        output_token_ids=[70_000, 3],
        sampling_params=SamplingParams(temperature=0.5, max_tokens=9, seed=11),
        eos_token_ids=(2, 5),
        block_ids=[70_001, 4],
        num_computed_tokens=6,
        is_beam=True,
        pooling=PoolingParams(
            normalize=False, task="score", dimensions=9, use_activation=True, second_text_start=70_006
        ),
        group_block_ids=[[NO_BLOCK, 70_005], [6, 7]],
        lora_number=70_010,
    )
    fields: dict[str, Any] = {
        "step": 41,
        "new_requests": [new],
        "freed_slots": [9, 300],
        "slots": [7, 301, 2],
        "num_scheduled_tokens": [302, 1, 1],
        "appended_slots": [301, 2],
        "appended_block_ids": [70_002, 8],
        "num_tokens": 304,
        "blocks_to_swap_out": [(1, 70_003), (2, 20)],
        "blocks_to_swap_in": [(3, 30), (70_004, 31)],
        "blocks_to_copy": [(4, 40), (5, 70_005)],
        "num_lookahead_tokens": [0, 4, 2],
        "appended_groups": [0, 2],
        "states_to_load": [(6, 300), (70_006, 2)],
        "states_to_save": [(300, 7), (3, 70_007)],
        "states_to_swap_out": [(8, 70_008)],
        "states_to_swap_in": [(70_009, 9)],
        "loras_to_remove": [3, 70_011],
    }
    return SchedulerOutput(**{**fields, **more})


def encoder() -> StepEncoder:
    return StepEncoder(session_epoch=2**40, worker_incarnation=2**41)


def test_every_field_of_a_step_is_on_the_wire() -> None:
    message = encoder().encode(output())
    # The worker drafts by itself: drafts of the scheduler's are not made. One lookahead for all has a field of its own.
    assert missing(message, but=frozenset({"num_draft_tokens", "draft_token_ids", "num_lookahead_slots"})) == []
    assert (message.session_epoch, message.worker_incarnation, message.step) == (2**40, 2**41, 41)
    assert (message.num_seqs, integers(message.slots, "H")) == (3, [7, 301, 2])
    assert integers(message.freed_slots, "H") == [9, 300]
    assert integers(message.num_scheduled_tokens) == [302, 1, 1]
    assert integers(message.appended_slots, "H") == [301, 2]
    assert integers(message.appended_block_ids) == [70_002, 8]
    assert integers(message.blocks_to_swap_out) == [1, 70_003, 2, 20]
    assert integers(message.blocks_to_swap_in) == [3, 30, 70_004, 31]
    assert integers(message.blocks_to_copy) == [4, 40, 5, 70_005]
    assert list(message.num_lookahead_tokens) == [0, 4, 2]
    assert list(message.appended_groups) == [0, 2]
    assert integers(message.states_to_load) == [6, 300, 70_006, 2]
    assert integers(message.states_to_save) == [300, 7, 3, 70_007]
    assert integers(message.states_to_swap_out) == [8, 70_008]
    assert integers(message.states_to_swap_in) == [70_009, 9]
    assert integers(message.loras_to_remove) == [3, 70_011]
    assert message.new_requests[0].lora_number == 70_010


def test_every_field_of_a_new_sequence_is_on_the_wire() -> None:
    step = output()
    (message,), (new,) = encoder().encode(step).new_requests, step.new_requests
    assert (
        missing(message, but=frozenset(f.name for f in types_pb2.SamplingParams.DESCRIPTOR.fields) | {"normalize"})
        == []
    )
    assert (message.slot, message.request_id, message.num_computed_tokens) == (7, "a/1", 6)
    assert token_ids_from_bytes(message.prompt_token_ids) == list(range(300))
    assert token_ids_from_bytes(message.output_token_ids) == [70_000, 3]
    assert (list(message.eos_token_ids), message.is_beam, message.pooling.normalize) == ([2, 5], True, False)
    assert pooling_params_from_proto(message.pooling) == new.pooling
    assert integers(message.block_ids) == [70_001, 4]
    assert integers(message.group_block_ids) == [NO_BLOCK, 70_005, 6, 7]
    assert sampling_params_from_proto(message.sampling_params) == new.sampling_params
    plain = encoder().encode(output(new_requests=[NewRequestData(1, "b", [1], [], SamplingParams(), (), [1], 0)]))
    assert not plain.new_requests[0].HasField("pooling")
    assert not plain.new_requests[0].group_block_ids
    assert not plain.new_requests[0].is_beam


def test_what_the_worker_knows_from_the_step_before_is_left_out() -> None:
    steps = encoder()
    plain = {
        "new_requests": [],
        "freed_slots": [],
        "appended_slots": [],
        "appended_block_ids": [],
        "num_scheduled_tokens": [1, 1, 1],
        "num_tokens": 3,
        "blocks_to_swap_out": (),
        "blocks_to_swap_in": (),
        "blocks_to_copy": (),
        "num_lookahead_tokens": None,
        "appended_groups": (),
        "states_to_load": (),
        "states_to_save": (),
        "states_to_swap_out": (),
        "states_to_swap_in": (),
        "loras_to_remove": (),
    }
    assert integers(steps.encode(output(**plain)).slots, "H") == [7, 301, 2]
    second = steps.encode(output(**plain, step=42))
    assert sorted(field.name for field, _ in second.ListFields()) == [
        "num_seqs",
        "session_epoch",
        "step",
        "worker_incarnation",
    ]
    assert integers(steps.encode(output(**plain, slots=[7, 2, 301])).slots, "H") == [7, 2, 301]
    assert integers(steps.encode(output(**plain)).slots, "H") == [7, 301, 2], "not those of the first step"


@pytest.mark.parametrize(
    ("lookahead", "for_all", "each"), [([3, 3, 3], 3, []), ([0, 0, 0], 0, []), ([0, 0, 1], 0, [0, 0, 1])]
)
def test_one_lookahead_for_all_is_one_number(lookahead: list[int], for_all: int, each: list[int]) -> None:
    message = encoder().encode(output(num_lookahead_tokens=lookahead))
    assert (message.num_lookahead_slots, list(message.num_lookahead_tokens)) == (for_all, each)


def columns(first: int) -> types_pb2.LogprobColumns:
    return types_pb2.LogprobColumns(
        rows=np.array([first, first + 1], "<u4").tobytes(),
        counts=np.array([2, 1], "<u4").tobytes(),
        token_ids=np.array([70_000, 5, 6], "<u4").tobytes(),
        logprobs=np.array([-0.5, -1.25, -2.0], "<f4").tobytes(),
        sampled_ranks=np.array([3, 1], "<u4").tobytes(),
    )


def check_columns(rows: LogprobRows | None, first: int) -> None:
    assert rows is not None
    assert rows.rows.tolist() == [first, first + 1]
    assert rows.counts.tolist() == [2, 1]
    assert rows.token_ids.tolist() == [70_000, 5, 6]
    assert rows.logprobs.tolist() == [-0.5, -1.25, -2.0]
    assert rows.sampled_ranks.tolist() == [3, 1]


def answer() -> worker_pb2.SamplerOutput:
    """An answer with every field."""
    message = worker_pb2.SamplerOutput(session_epoch=1, worker_incarnation=2, step=43)
    message.num_sampled_tokens = bytes([2, 0, 1])
    message.token_ids = np.array([300, 70_000, 9], "<u4").tobytes()
    message.num_draft_tokens = bytes([4, 0, 1])
    message.logprobs.CopyFrom(columns(0))
    message.prompt_logprobs.add(slot=6, start=256).logprobs.CopyFrom(columns(5))
    message.prompt_logprobs.add(slot=8, start=3).logprobs.CopyFrom(columns(7))
    message.bad_slots.add(slot=5, code=3, message="why", field="prompt")
    message.bad_slots.add(slot=4, code=13, message="other")
    message.pooled.slots = np.array([3, 300], "<u2").tobytes()
    message.pooled.values = np.array([1, 2, 3, 4], "<f4").tobytes()
    message.timings.queue_ns, message.timings.prepare_ns = 10, 200
    message.timings.forward_ns, message.timings.sample_ns = 3_000, 40_000
    return message


def test_every_field_of_an_answer_is_read() -> None:
    assert missing(answer(), but=frozenset({"dimension", "size", "counts"})) == [], "the test's own message"
    result = model_runner_output_from_proto(answer(), encode_ns=7, round_trip_ns=100_000)
    assert result.step == 43
    assert result.num_sampled_tokens == [2, 0, 1]
    assert result.token_ids == [300, 70_000, 9]
    assert result.num_draft_tokens == [4, 0, 1]
    check_columns(result.logprobs, 0)
    assert [(chunk.slot, chunk.start) for chunk in result.prompt_logprobs] == [(6, 256), (8, 3)]
    check_columns(result.prompt_logprobs[0].logprobs, 5)
    check_columns(result.prompt_logprobs[1].logprobs, 7)
    assert [(bad.slot, bad.code, bad.message, bad.field) for bad in result.bad_slots] == [
        (5, 3, "why", "prompt"),
        (4, 13, "other", ""),
    ]
    assert result.pooled == {3: np.array([1, 2], "<f4").tobytes(), 300: np.array([3, 4], "<f4").tobytes()}
    timings = result.timings
    assert timings is not None
    assert timings[:6] == (7, 100_000 - 43_210, 10, 200, 3_000, 40_000)
    assert (timings.compute_ns, timings.decode_ns > 0) == (43_200, True)


def test_results_of_different_lengths_are_cut_by_their_counts() -> None:
    message = answer()
    message.pooled.slots = np.array([3, 300, 5], "<u2").tobytes()
    message.pooled.counts = np.array([3, 1, 2], "<u4").tobytes()
    message.pooled.values = np.array([1, 2, 3, 4, 5, 6], "<f4").tobytes()
    pooled = model_runner_output_from_proto(message, round_trip_ns=0).pooled
    assert pooled is not None
    assert {slot: np.frombuffer(values, "<f4").tolist() for slot, values in pooled.items()} == {
        3: [1, 2, 3],
        300: [4],
        5: [5, 6],
    }


def test_an_answer_without_anything_special_is_plain() -> None:
    message = worker_pb2.SamplerOutput(step=1, token_ids=np.array([8], "<u4").tobytes())
    message.timings.forward_ns = 50
    result = model_runner_output_from_proto(message, round_trip_ns=20)
    assert result.timings is not None
    assert result.timings.wire_ns == 0, "clocks of two processes differ"
    assert result[:8] == (1, None, [8], None, [], [], None, None)


def test_what_a_model_keeps_is_read_group_by_group() -> None:
    info = types_pb2.ModelInfo(
        cache_groups=[
            types_pb2.CacheGroup(kind=types_pb2.CACHE_KIND_FULL, num_layers=5),
            types_pb2.CacheGroup(kind=types_pb2.CACHE_KIND_WINDOW, num_layers=6, window=512),
            types_pb2.CacheGroup(kind=types_pb2.CACHE_KIND_RECURRENT, num_layers=7),
            types_pb2.CacheGroup(kind=types_pb2.CACHE_KIND_NONE, num_layers=8),
        ]
    )
    groups = cache_groups_from_proto(info)
    assert groups == (
        CacheGroup("full", 5),
        CacheGroup("window", 6, 512),
        CacheGroup("recurrent", 7),
        CacheGroup("none", 8),
    )
    assert [group.has_blocks for group in groups] == [True, True, False, False]
    assert cache_groups_from_proto(types_pb2.ModelInfo()) == (CacheGroup("full"),), "a worker before groups"


@pytest.mark.parametrize(
    ("kind", "window", "message"),
    [
        (0, 0, "cache_groups[1].kind is 0, this scheduler knows [1, 2, 3, 4]"),
        (9, 0, "cache_groups[1].kind is 9, this scheduler knows [1, 2, 3, 4]"),
        (types_pb2.CACHE_KIND_WINDOW, 0, "cache_groups[1].window is 0, must be at least 1"),
        (types_pb2.CACHE_KIND_FULL, 4, "cache_groups[1].window is 4, must be 0 for kind full"),
    ],
)
def test_a_group_that_this_scheduler_does_not_know_is_refused(kind: Any, window: int, message: str) -> None:
    known = types_pb2.CacheGroup(kind=types_pb2.CACHE_KIND_FULL)
    info = types_pb2.ModelInfo(cache_groups=[known, types_pb2.CacheGroup(kind=kind, window=window)])
    with pytest.raises(ConfigError) as error:
        cache_groups_from_proto(info)
    assert error.value.message == message


def distinct_config() -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model="org/name",
            revision="main",
            dtype="float32",
            quantization="int8",
            device="cpu",
            max_model_len=4321,
            load_format="dummy",
            max_logprobs=17,
            seed=23,
            logprobs_mode="processed_logprobs",
            reference_kernels=("rms_norm",),
            enforce_eager=True,
            runner="pooling",
            convert="embed",
            pooler_config='{"normalize": true}',
            hf_overrides='{"is_causal": false}',
        ),
        cache=CacheConfig(
            block_size=32,
            kv_cache_memory_bytes=1_000_001,
            gpu_memory_utilization=0.75,
            cpu_kv_cache_memory_bytes=2_000_002,
            kv_cache_dtype="int8",
        ),
        scheduler=SchedulerConfig(max_num_seqs=19, max_num_batched_tokens=333),
        speculative=SpeculativeConfig(
            method="ngram", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2
        ),
    )


def test_every_field_of_the_workers_configuration_is_on_the_wire() -> None:
    config = distinct_config()
    message = worker_config_to_proto(config)
    groups = (config.model, config.cache, config.scheduler)
    for field in message.DESCRIPTOR.fields:
        if field.name in ("speculative", "takes_cache_groups", "lora"):
            continue
        value = next(getattr(group, field.name) for group in groups if hasattr(group, field.name))
        actual = getattr(message, field.name)
        if field.is_repeated:
            assert tuple(actual) == tuple(value or ()), field.name
        elif isinstance(value, float):
            assert math.isclose(actual, value, rel_tol=1e-6), field.name
        else:
            assert actual == (value if value is not None else type(actual)()), field.name
    assert message.takes_cache_groups, "this scheduler knows them"
    drafts = message.speculative
    assert (drafts.method, drafts.num_speculative_tokens) == ("ngram", 5)
    assert (drafts.prompt_lookup_max, drafts.prompt_lookup_min) == (4, 2)
    assert not worker_config_to_proto(EngineConfig()).HasField("speculative")
    assert not message.HasField("lora")
    lora = LoraConfig(enable_lora=True, max_loras=3, max_lora_rank=5, lora_target_modules=("q_proj", "up_proj"))
    sent = worker_config_to_proto(EngineConfig(lora=lora)).lora
    assert (sent.max_loras, sent.max_lora_rank, sent.max_cpu_loras) == (3, 5, 3)
    assert list(sent.target_modules) == ["q_proj", "up_proj"]


def test_the_first_call_to_a_worker_carries_everything() -> None:
    weights = WeightsSource(model="new", revision="r", version=9, is_for_one_group=True)
    message = init_device_to_proto(distinct_config(), session_epoch=77, weights=weights, rendezvous_address="host:1")
    assert (message.session_epoch, message.rendezvous_address) == (77, "host:1")
    assert message.config == worker_config_to_proto(distinct_config())
    assert weights_source_from_proto(message.weights) == weights
    assert not init_device_to_proto(EngineConfig(), session_epoch=1, weights=None).HasField("weights")
