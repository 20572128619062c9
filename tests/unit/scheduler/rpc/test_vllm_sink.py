"""What VllmEngine's callers get of log probabilities: as many as they asked for, the likeliest first."""

import numpy as np
import pytest

pytest.importorskip("smg_grpc_proto")

from pagoda_scheduler.core.step import LogprobRows
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.vllm_engine.sink import VllmEngineSink
from tests.unit.scheduler.stories import make_request


def sink_of(num_logprobs: int | None, *, streams: bool = True) -> VllmEngineSink:
    return VllmEngineSink(
        num_sequences=1, streams=streams, num_logprobs=num_logprobs, takes_prompt=False, on_room=lambda sink: None
    )


def result() -> StepResult:
    """One token of one sequence, sampled as the third likeliest of four."""
    request = make_request("a", 4)
    step = StepResult(step=1)
    request.output_token_ids.append(12)
    step.add_token(request, 12, 0)
    step.logprobs = LogprobRows(
        rows=np.array([0], np.uint32),
        counts=np.array([4], np.uint32),
        token_ids=np.array([12, 10, 11, 13], np.uint32),
        logprobs=np.array([-3, -1, -2, -4], np.float32),
        sampled_ranks=np.array([3], np.uint32),
    )
    return step


@pytest.mark.parametrize(
    ("num_logprobs", "expected"), [(0, []), (1, [10]), (3, [10, 11, 12]), (-1, [10, 11, 12, 13]), (9, [10, 11, 12, 13])]
)
async def test_as_many_likeliest_tokens_come_as_were_asked_for(num_logprobs: int, expected: list[int]) -> None:
    sink = sink_of(num_logprobs)
    sink.push(result())
    message = await anext(aiter(sink.outbox))
    logprobs = message.chunk.output_logprobs
    assert (list(logprobs.token_ids), list(logprobs.token_logprobs)) == ([12], [-3])
    assert list(logprobs.top_logprobs[0].token_ids) == expected
    assert list(logprobs.top_logprobs[0].values) == [-float(token - 9) for token in expected]


async def test_none_come_where_none_were_asked_for() -> None:
    sink = sink_of(None)
    sink.push(result())
    message = await anext(aiter(sink.outbox))
    assert not message.chunk.HasField("output_logprobs")
