"""An engine that makes of a prompt what a test says, and what it was sent."""

from typing import Any

import numpy as np

from pagoda.v1 import types_pb2
from tests.fakes.fake_scheduler import FakeScheduler
from tests.service.frontend.harness import Running

EMBED, TOKEN_EMBED = types_pb2.POOLING_TASK_EMBED, types_pb2.POOLING_TASK_TOKEN_EMBED
CLASSIFY, SCORE = types_pb2.POOLING_TASK_CLASSIFY, types_pb2.POOLING_TASK_SCORE
TOKEN_CLASSIFY = types_pb2.POOLING_TASK_TOKEN_CLASSIFY
MAX_MODEL_LEN = 512


class PoolingEngine(FakeScheduler):
    """Makes of a prompt what `made` says of its last token; by default what the fake makes."""

    def __init__(self, *tasks: types_pb2.PoolingTask, **model: Any) -> None:
        super().__init__()
        self.made: dict[int, list[float]] = {}
        self.model_info.MergeFrom(types_pb2.ModelInfo(pooling_tasks=tasks, **model))

    def embedding(self, prompt_token_ids: list[int], *, is_unit: bool = True) -> bytes:
        values = self.made.get(prompt_token_ids[-1])
        if values is None:
            return super().embedding(prompt_token_ids, is_unit=is_unit)
        return np.asarray(values, dtype="<f4").tobytes()


def sent_pooling(running: Running) -> list[types_pb2.PoolingParams]:
    return [submit.pooling for submit in running.fake.submits]
