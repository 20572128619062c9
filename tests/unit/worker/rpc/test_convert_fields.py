"""Every field of a step's messages and of the worker's configuration arrives where it belongs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagoda.v1 import types_pb2, worker_pb2
from pagoda_common.config.engine_config import FIT_MEMORY
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import Code, InvalidRequest
from pagoda_worker.loader.model_facts import ModelFacts
from pagoda_worker.models.cache_groups import CacheGroup
from pagoda_worker.rpc.convert import (
    engine_config_from_proto,
    model_facts_to_proto,
    step_input_from_proto,
    step_output_to_proto,
)
from pagoda_worker.steps.step import BadSlot, LogprobColumns, PooledColumns, PromptLogprobs, StepOutput, StepTimings

SIZES: dict[str, Any] = {
    "model": "m",
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "gpu_memory_utilization": 0.5,
}
"""What every configuration has."""


def column(*values: int, dtype: str = "<u4") -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def test_blocks_move_in_their_own_columns() -> None:
    step = step_input_from_proto(
        worker_pb2.ExecuteModelRequest(
            blocks_to_swap_out=column(1, 2, 3, 4), blocks_to_swap_in=column(5, 6), blocks_to_copy=column(7, 8)
        ),
        arrived_ns=12,
    )
    assert step.blocks_to_swap_out.tolist() == [[1, 2], [3, 4]]
    assert step.blocks_to_swap_in.tolist() == [[5, 6]]
    assert step.blocks_to_copy.tolist() == [[7, 8]]
    assert step.arrived_ns == 12


def test_drafts_are_allowed_for_each_sequence_or_for_all_alike() -> None:
    each = worker_pb2.ExecuteModelRequest(num_seqs=2, num_lookahead_tokens=bytes([255, 3]))
    alike = worker_pb2.ExecuteModelRequest(num_seqs=3, num_lookahead_slots=4)
    found = [step_input_from_proto(message).num_lookahead_tokens for message in (each, alike)]
    assert [None if column is None else column.tolist() for column in found] == [[255, 3], [4, 4, 4]]
    assert step_input_from_proto(worker_pb2.ExecuteModelRequest(num_seqs=3)).num_lookahead_tokens is None


def test_beams_and_embeddings_are_marked() -> None:
    new = [
        worker_pb2.NewRequest(slot=1, prompt_token_ids=column(5), is_beam=True),
        worker_pb2.NewRequest(slot=2, prompt_token_ids=column(5), pooling=types_pb2.PoolingParams()),
    ]
    beam, pooled = step_input_from_proto(worker_pb2.ExecuteModelRequest(new_requests=new)).new_requests
    assert (beam.is_beam, beam.pooling) == (True, None)
    assert not pooled.is_beam
    assert pooled.pooling is not None


def test_an_answer_has_every_field() -> None:
    def columns(place: int) -> LogprobColumns:
        ints = [np.array([10 * place + number]) for number in range(4)]
        return LogprobColumns(
            rows=ints[0],
            counts=ints[1],
            token_ids=ints[2],
            sampled_ranks=ints[3],
            logprobs=np.array([-place], dtype=np.float32),
        )

    output = StepOutput(
        num_sampled_tokens=np.array([2, 0]),
        num_draft_tokens=np.array([3, 1]),
        token_ids=np.array([70_000, 8]),
        logprobs=columns(1),
        prompt_logprobs=[PromptLogprobs(slot=4, start=257, logprobs=columns(2))],
        pooled=PooledColumns(slots=np.array([300]), values=[np.array([0.5, -2.0], dtype=np.float32)]),
        bad_slots=[BadSlot(slot=5, code=Code.INVALID_ARGUMENT, message="why", field="top_p")],
        timings=StepTimings(queue_ns=1, prepare_ns=2, forward_ns=3, sample_ns=4),
    )
    message = step_output_to_proto(output, worker_pb2.ExecuteModelRequest(step=1))
    assert (message.num_sampled_tokens, message.num_draft_tokens) == (bytes([2, 0]), bytes([3, 1]))
    assert message.token_ids == column(70_000, 8)
    (chunk,) = message.prompt_logprobs
    assert (chunk.slot, chunk.start) == (4, 257)
    for place, told in ((1, message.logprobs), (2, chunk.logprobs)):
        assert (told.rows, told.counts) == (column(10 * place), column(10 * place + 1))
        assert (told.token_ids, told.sampled_ranks) == (column(10 * place + 2), column(10 * place + 3))
        assert told.logprobs == np.array([-place], dtype="<f4").tobytes()
    assert message.pooled.slots == column(300, dtype="<u2")
    assert message.pooled.values == np.array([0.5, -2.0], dtype="<f4").tobytes()
    (bad,) = message.bad_slots
    assert (bad.slot, bad.code, bad.message, bad.field) == (5, int(Code.INVALID_ARGUMENT), "why", "top_p")
    told_timings = message.timings
    assert (told_timings.queue_ns, told_timings.prepare_ns) == (1, 2)
    assert (told_timings.forward_ns, told_timings.sample_ns) == (3, 4)


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("model", "other", "model.model"),
        ("revision", "abc", "model.revision"),
        ("dtype", "bfloat16", "model.dtype"),
        ("device", "cpu", "model.device"),
        ("max_model_len", 77, "model.max_model_len"),
        ("max_logprobs", 9, "model.max_logprobs"),
        ("logprobs_mode", "raw_logits", "model.logprobs_mode"),
        ("enforce_eager", True, "model.enforce_eager"),
        ("seed", 5, "model.seed"),
        ("block_size", 32, "cache.block_size"),
        ("kv_cache_memory_bytes", 1 << 20, "cache.kv_cache_memory_bytes"),
        ("gpu_memory_utilization", 0.25, "cache.gpu_memory_utilization"),
        ("cpu_kv_cache_memory_bytes", 1 << 21, "cache.cpu_kv_cache_memory_bytes"),
        ("kv_cache_dtype", "int8", "cache.kv_cache_dtype"),
        ("quantization", "int8", "model.quantization"),
        ("load_format", "dummy", "model.load_format"),
        ("logits_processors", ("a:B", "c:D"), "model.logits_processors"),
        ("reference_kernels", ("rms_norm", "argmax"), "model.reference_kernels"),
        ("model_impl", "transformers", "model.model_impl"),
        ("runner", "generate", "model.runner"),
        ("convert", "none", "model.convert"),
        ("hf_overrides", '{"rope_theta": 7}', "model.hf_overrides"),
        ("max_num_seqs", 3, "scheduler.max_num_seqs"),
        ("max_num_batched_tokens", 99, "scheduler.max_num_batched_tokens"),
    ],
)
def test_each_part_of_the_configuration_arrives(field: str, value: Any, place: str) -> None:
    config: Any = engine_config_from_proto(worker_pb2.WorkerConfig(**(SIZES | {field: value})))
    for name in place.split("."):
        config = getattr(config, name)
    assert config == value


def test_what_is_left_out_of_a_configuration_is_the_default() -> None:
    config = engine_config_from_proto(worker_pb2.WorkerConfig(**SIZES))
    model, cache = config.model, config.cache
    assert {model.revision, model.quantization, model.max_model_len, cache.kv_cache_memory_bytes} == {None}
    names = ("dtype", "device", "activation_quantization", "load_format", "attention_backend", "model_impl")
    assert {getattr(model, name) for name in (*names, "runner", "convert")} | {cache.kv_cache_dtype} == {"auto"}
    assert (model.logprobs_mode, model.logits_processors, model.reference_kernels) == ("raw_logprobs", (), ())
    assert (config.speculative, config.lora) == (SpeculativeConfig(), LoraConfig())
    assert not config.lora.enable_lora
    pooling = worker_pb2.WorkerConfig(
        **SIZES, runner="pooling", convert="embed", pooler_config='{"use_activation": true}'
    )
    assert engine_config_from_proto(pooling).model.pooler_config == '{"use_activation": true}'


def test_a_context_that_fits_the_memory_goes_before_its_number() -> None:
    fits = worker_pb2.WorkerConfig(**SIZES, max_model_len=77, fits_max_model_len=True)
    assert engine_config_from_proto(fits).model.max_model_len == FIT_MEMORY


def test_options_of_drafts_and_of_adapters_arrive() -> None:
    config = engine_config_from_proto(
        worker_pb2.WorkerConfig(
            **SIZES,
            speculative=worker_pb2.SpeculativeConfig(
                method="ngram", num_speculative_tokens=3, prompt_lookup_max=7, prompt_lookup_min=2
            ),
            lora=worker_pb2.LoraConfig(
                max_loras=2, max_lora_rank=9, max_cpu_loras=6, target_modules=["q_proj", "o_proj"]
            ),
        )
    )
    assert config.speculative == SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=7, prompt_lookup_min=2)
    assert config.lora == LoraConfig(
        enable_lora=True, max_loras=2, max_lora_rank=9, max_cpu_loras=6, lora_target_modules=("q_proj", "o_proj")
    )


FACTS = ModelFacts(
    model="m",
    architecture="A",
    dtype="bfloat16",
    vocab_size=10,
    max_model_len=20,
    num_layers=30,
    eos_token_ids=(3, 4),
    generation_config_json='{"a": 1}',
    num_parameters=50,
    weight_bytes=60,
    quantization="int4-g128",
    embedding_size=70,
    pooling_tasks=("score", "classify"),
    unserved_pooling_tasks=("embed",),
    only_pools=True,
    labels=("yes", "no"),
    matryoshka=(8, 16),
)


def test_every_fact_of_a_model_is_told() -> None:
    info = model_facts_to_proto(FACTS)
    names = set(info.DESCRIPTOR.fields_by_name) - {"pooling_tasks", "unserved_pooling_tasks", "weights", "cache_groups"}
    told = {name: getattr(info, name) for name in names}
    repeated = {name: tuple(told.pop(name)) for name in ("eos_token_ids", "labels", "matryoshka_dimensions")}
    assert repeated == {"eos_token_ids": (3, 4), "labels": ("yes", "no"), "matryoshka_dimensions": (8, 16)}
    assert told == {
        "model": "m",
        "architecture": "A",
        "dtype": "bfloat16",
        "vocab_size": 10,
        "max_model_len": 20,
        "num_layers": 30,
        "generation_config_json": '{"a": 1}',
        "num_parameters": 50,
        "weight_bytes": 60,
        "quantization": "int4-g128",
        "embedding_size": 70,
        "only_pools": True,
        "has_matryoshka": True,
    }
    assert list(info.pooling_tasks) == [types_pb2.POOLING_TASK_SCORE, types_pb2.POOLING_TASK_CLASSIFY]
    assert list(info.unserved_pooling_tasks) == [types_pb2.POOLING_TASK_EMBED]


@pytest.mark.parametrize(("matryoshka", "told"), [(None, (False, [])), ((), (True, [])), ((8,), (True, [8]))])
def test_embeddings_are_shortened_to_any_length_to_some_or_not_at_all(
    matryoshka: tuple[int, ...] | None, told: tuple[bool, list[int]]
) -> None:
    info = model_facts_to_proto(replace(FACTS, matryoshka=matryoshka))
    assert (info.has_matryoshka, list(info.matryoshka_dimensions)) == told


def test_each_kind_of_cache_has_its_number() -> None:
    groups = [
        CacheGroup("full", (0, 1)),
        CacheGroup("latent", (2,)),
        CacheGroup("window", (3, 4, 5), 8),
        CacheGroup("recurrent", (6,)),
        CacheGroup("none", (7,)),
    ]
    told = [(one.kind, one.num_layers, one.window) for one in model_facts_to_proto(FACTS, groups).cache_groups]
    assert told == [
        (types_pb2.CACHE_KIND_FULL, 2, 0),
        (types_pb2.CACHE_KIND_FULL, 1, 0),
        (types_pb2.CACHE_KIND_WINDOW, 3, 8),
        (types_pb2.CACHE_KIND_RECURRENT, 1, 0),
        (types_pb2.CACHE_KIND_NONE, 1, 0),
    ]


COLUMNS = {
    **dict.fromkeys(("freed_slots", "appended_slots", "slots"), 2),
    **dict.fromkeys(("loras_to_remove", "appended_block_ids", "num_scheduled_tokens"), 4),
    **dict.fromkeys(("appended_groups", "num_lookahead_tokens"), 1),
}
"""Columns of a step, and the bytes of an entry."""
PAIRS = [
    *("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy"),
    *("states_to_swap_out", "states_to_swap_in", "states_to_load", "states_to_save"),
]


@pytest.mark.parametrize("name", COLUMNS)
def test_each_column_is_read_into_its_own_place(name: str) -> None:
    dtype = f"<u{COLUMNS[name]}"
    values = [200, 7, 255] if dtype == "<u1" else [300, 7, 65_535] if dtype == "<u2" else [70_000, 7, 2**32 - 1]
    message = worker_pb2.ExecuteModelRequest(num_seqs=3, **{name: column(*values, dtype=dtype)})
    step = step_input_from_proto(message)
    assert getattr(step, name).tolist() == values
    others = [other for other in COLUMNS if other != name and getattr(step, other) is not None]
    assert all(getattr(step, other).size == 0 for other in (*others, *PAIRS))
    if dtype != "<u1":
        torn = worker_pb2.ExecuteModelRequest(num_seqs=3, **{name: b"123"})
        with pytest.raises(InvalidRequest, match=f"^{name} has 3 bytes, must be a multiple of {dtype[2:]}$") as caught:
            step_input_from_proto(torn)
        assert caught.value.field == name


@pytest.mark.parametrize("name", PAIRS)
def test_each_column_of_pairs_is_read_into_its_own_place(name: str) -> None:
    given = {name: column(70_000, 2, 3, 4)}
    step = step_input_from_proto(worker_pb2.ExecuteModelRequest(**given))
    assert getattr(step, name).tolist() == [[70_000, 2], [3, 4]]
    assert all(getattr(step, other).shape == (0, 2) for other in PAIRS if other != name)
    torn = {name: column(1, 2, 3)}
    with pytest.raises(InvalidRequest, match=f"^{name} has 3 entries, must be pairs$") as caught:
        step_input_from_proto(worker_pb2.ExecuteModelRequest(**torn))
    assert caught.value.field == name


def test_blocks_of_other_groups_are_rows_beside_those_of_the_first() -> None:
    fields: dict[str, Any] = {"slot": 1, "prompt_token_ids": column(5), "block_ids": column(1, 2), "lora_number": 9}
    message = worker_pb2.NewRequest(**fields, group_block_ids=column(3, 4, 5, 6))
    torn = worker_pb2.NewRequest(**fields, group_block_ids=column(3, 4, 5))
    without = worker_pb2.NewRequest(slot=2, prompt_token_ids=column(5), group_block_ids=column(3))
    step = step_input_from_proto(worker_pb2.ExecuteModelRequest(new_requests=[message, torn, without]))
    (new,) = step.new_requests
    assert (new.block_ids.tolist(), new.group_block_ids.tolist(), new.lora_number) == ([1, 2], [[3, 4], [5, 6]], 9)
    text = "group_block_ids has {} entries, must be a multiple of block_ids, {}"
    assert step.rejected == [
        BadSlot(slot=slot, code=Code.INVALID_ARGUMENT, message=text.format(*sizes), field="group_block_ids")
        for slot, sizes in ((1, (3, 2)), (2, (1, 0)))
    ]
    plain = worker_pb2.NewRequest(**fields)
    (alone,) = step_input_from_proto(worker_pb2.ExecuteModelRequest(new_requests=[plain])).new_requests
    assert alone.group_block_ids.shape == (0, 0)


@pytest.mark.parametrize(("sizes", "counts"), [([2, 3], [2, 3]), ([2, 2], []), ([4], [])])
def test_results_of_different_lengths_are_counted(sizes: list[int], counts: list[int]) -> None:
    values = [np.arange(size, dtype=np.float32) for size in sizes]
    pooled = PooledColumns(slots=np.arange(len(sizes)), values=values)
    message = step_output_to_proto(StepOutput(pooled=pooled), worker_pb2.ExecuteModelRequest(step=1))
    assert message.pooled.counts == (column(*counts) if counts else b"")
    assert message.pooled.values == np.concatenate(values).astype("<f4").tobytes()
    assert not step_output_to_proto(StepOutput(), worker_pb2.ExecuteModelRequest(step=1)).HasField("pooled")
