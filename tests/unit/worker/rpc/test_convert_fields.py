"""Every field of a step's messages and of the worker's configuration arrives where it belongs."""

from typing import Any

import numpy as np
import pytest

from pagoda.v1 import types_pb2, worker_pb2
from pagoda_common.errors import Code
from pagoda_worker.rpc.convert import engine_config_from_proto, step_input_from_proto, step_output_to_proto
from pagoda_worker.steps.step import BadSlot, LogprobColumns, PooledColumns, PromptLogprobs, StepOutput, StepTimings


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
        ("max_num_seqs", 3, "scheduler.max_num_seqs"),
        ("max_num_batched_tokens", 99, "scheduler.max_num_batched_tokens"),
    ],
)
def test_each_part_of_the_configuration_arrives(field: str, value: Any, place: str) -> None:
    given: dict[str, Any] = {
        "model": "m",
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.5,
    }
    config: Any = engine_config_from_proto(worker_pb2.WorkerConfig(**(given | {field: value})))
    for name in place.split("."):
        config = getattr(config, name)
    assert config == value
