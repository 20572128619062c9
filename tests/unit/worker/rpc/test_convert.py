"""Messages of the worker to domain types and back."""

from typing import Any

import numpy as np
import pytest

from pagoda.v1 import types_pb2, worker_pb2
from pagoda_common.config.engine_config import ActivationQuantization, EngineConfig, ModelConfig
from pagoda_common.errors import Code, ConfigError, InvalidRequest
from pagoda_scheduler.rpc.convert import worker_config_to_proto
from pagoda_worker.rpc.convert import (
    engine_config_from_proto,
    step_input_from_proto,
    step_output_to_proto,
)
from pagoda_worker.steps.step import BadSlot, LogprobColumns, PromptLogprobs, StepOutput, StepTimings


def column(*values: int, dtype: str = "<u4") -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def test_a_step_is_read_column_by_column() -> None:
    step = step_input_from_proto(
        worker_pb2.ExecuteModelRequest(
            num_seqs=2,
            slots=column(3, 65535, dtype="<u2"),
            num_scheduled_tokens=column(7, 1),
            freed_slots=column(4, dtype="<u2"),
            appended_slots=column(3, dtype="<u2"),
            appended_block_ids=column(2**31),
            blocks_to_copy=column(1, 2, 3, 4),
            new_requests=[
                worker_pb2.NewRequest(
                    slot=3,
                    request_id="a",
                    prompt_token_ids=column(5, 6),
                    output_token_ids=column(7),
                    sampling_params=types_pb2.SamplingParams(temperature=0.5, seed=2**64 - 1),
                    block_ids=column(9),
                    num_computed_tokens=2,
                    eos_token_ids=[0, 2],
                )
            ],
        )
    )
    assert step.slots is not None
    assert step.num_scheduled_tokens is not None
    assert (step.slots.tolist(), step.num_scheduled_tokens.tolist()) == ([3, 65535], [7, 1])
    assert (step.freed_slots.tolist(), step.appended_slots.tolist()) == ([4], [3])
    assert step.appended_block_ids.tolist() == [2**31]
    assert step.blocks_to_copy.tolist() == [[1, 2], [3, 4]]
    assert step.blocks_to_swap_in.shape == (0, 2)
    (new,) = step.new_requests
    assert (new.slot, new.request_id, new.num_computed_tokens, new.eos_token_ids) == (3, "a", 2, (0, 2))
    assert (new.prompt_token_ids.tolist(), new.output_token_ids.tolist()) == ([5, 6], [7])
    assert (new.sampling_params.temperature, new.sampling_params.seed) == (0.5, 2**64 - 1)


def test_an_empty_message_is_the_batch_of_the_step_before() -> None:
    step = step_input_from_proto(worker_pb2.ExecuteModelRequest(num_seqs=5))
    assert (step.slots, step.num_scheduled_tokens, step.new_requests) == (None, None, [])


def test_a_request_that_cannot_be_read_is_rejected_alone() -> None:
    good = worker_pb2.NewRequest(slot=0, prompt_token_ids=column(1))
    bad = worker_pb2.NewRequest(slot=1, sampling_params=types_pb2.SamplingParams(top_p=3.0))
    step = step_input_from_proto(worker_pb2.ExecuteModelRequest(new_requests=[good, bad]))
    assert [new.slot for new in step.new_requests] == [0]
    assert step.rejected == [
        BadSlot(slot=1, code=Code.INVALID_ARGUMENT, message="top_p must be in (0, 1], got 3.0", field="top_p"),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"freed_slots": b"\0"}, "freed_slots has 1 bytes, must be a multiple of 2"),
        ({"num_scheduled_tokens": b"\0" * 6, "num_seqs": 1}, "num_scheduled_tokens has 6 bytes"),
        ({"blocks_to_copy": b"\0" * 12}, "blocks_to_copy has 3 entries, must be pairs"),
    ],
)
def test_a_torn_column_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        step_input_from_proto(worker_pb2.ExecuteModelRequest(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"block_ids": column(1, 2), "group_block_ids": column(3)},
            "has 1 entries, must be a multiple of block_ids, 2",
        ),
        ({"group_block_ids": column(3)}, "group_block_ids has 1 entries, must be a multiple of block_ids, 0"),
        ({"prompt_token_ids": b"\0" * 5}, "prompt_token_ids has 5 bytes, must be a multiple of 4"),
    ],
)
def test_a_request_with_a_torn_column_is_rejected(fields: dict[str, Any], message: str) -> None:
    new = worker_pb2.NewRequest(slot=2, **fields)
    step = step_input_from_proto(worker_pb2.ExecuteModelRequest(new_requests=[new]))
    (bad,) = step.rejected
    assert (step.new_requests, bad.slot, bad.code, bad.field) == ([], 2, Code.INVALID_ARGUMENT, list(fields)[-1])
    assert message in bad.message


def test_blocks_of_further_groups_are_one_row_each() -> None:
    new = worker_pb2.NewRequest(block_ids=column(1, 2), group_block_ids=column(3, 4, 5, 6))
    (read,) = step_input_from_proto(worker_pb2.ExecuteModelRequest(new_requests=[new])).new_requests
    assert read.group_block_ids.tolist() == [[3, 4], [5, 6]]


def test_an_answer_carries_address_columns_and_faults() -> None:
    columns = LogprobColumns(
        rows=np.array([1]),
        counts=np.array([2]),
        token_ids=np.array([8, 9]),
        logprobs=np.array([-0.5, -1.0], dtype=np.float32),
        sampled_ranks=np.array([1]),
    )
    request = worker_pb2.ExecuteModelRequest(session_epoch=3, worker_incarnation=2**63, step=9)
    message = step_output_to_proto(
        StepOutput(
            num_sampled_tokens=np.array([1, 0, 1]),
            token_ids=np.array([7, 8]),
            logprobs=columns,
            prompt_logprobs=[PromptLogprobs(slot=4, start=1, logprobs=columns)],
            bad_slots=[BadSlot(slot=5, code=Code.INTERNAL, message="why")],
            timings=StepTimings(queue_ns=1, prepare_ns=2, forward_ns=3, sample_ns=4),
        ),
        request,
    )
    assert (message.session_epoch, message.worker_incarnation, message.step) == (3, 2**63, 9)
    assert (list(message.num_sampled_tokens), message.token_ids) == ([1, 0, 1], column(7, 8))
    assert message.logprobs.rows == column(1)
    assert message.logprobs.logprobs == np.array([-0.5, -1.0], dtype="<f4").tobytes()
    assert message.prompt_logprobs[0].logprobs == message.logprobs
    assert (message.bad_slots[0].slot, message.bad_slots[0].code) == (5, 13)
    assert message.timings.sample_ns == 4
    plain = step_output_to_proto(StepOutput(token_ids=np.array([1])), request)
    assert (plain.num_sampled_tokens, plain.HasField("logprobs")) == (b"", False)


def test_the_config_is_validated() -> None:
    message = worker_pb2.WorkerConfig(
        model="m", block_size=32, max_num_seqs=4, max_num_batched_tokens=64, gpu_memory_utilization=0.5
    )
    config = engine_config_from_proto(message)
    assert (config.cache.block_size, config.cache.kv_cache_memory_bytes, config.model.max_model_len) == (32, None, None)
    assert (config.model.dtype, config.model.device) == ("auto", "auto")
    assert not config.model.enforce_eager
    assert config.model.attention_backend == "auto"
    message.attention_backend = "triton"
    assert engine_config_from_proto(message).model.attention_backend == "triton"
    assert config.model.activation_quantization == "auto"
    message.activation_quantization = "none"
    assert engine_config_from_proto(message).model.activation_quantization == "none"
    message.enforce_eager = True
    assert engine_config_from_proto(message).model.enforce_eager
    message.block_size = 0
    with pytest.raises(ConfigError, match="block_size is 0"):
        engine_config_from_proto(message)


@pytest.mark.parametrize("value", ["auto", "none"])
def test_activation_quantization_reaches_the_worker(value: ActivationQuantization) -> None:
    message = worker_config_to_proto(EngineConfig(model=ModelConfig(activation_quantization=value)))
    assert message.activation_quantization == value
    assert engine_config_from_proto(message).model.activation_quantization == value


def test_a_worker_refuses_what_it_does_not_know_of_activation_quantization() -> None:
    message = worker_config_to_proto(EngineConfig())
    message.activation_quantization = "int8"
    with pytest.raises(ConfigError, match="activation_quantization is 'int8', must be one of auto, none"):
        engine_config_from_proto(message)
