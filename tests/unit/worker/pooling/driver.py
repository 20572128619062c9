"""Pools prompts with a worker, all in one step or in several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda_common.params.pooling_params import POOLED, PoolingParams
from pagoda_worker.steps.step import NewRequest, StepOutput
from tests.unit.worker.driver import Driver

NO_BLOCKS = np.zeros(0, dtype=np.int64)


class PoolingDriver(Driver):
    """A worker whose model keeps nothing."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        super().__init__(model, num_blocks=0, **options)

    def pool(
        self, prompts: Sequence[Sequence[int]], params: PoolingParams | Sequence[PoolingParams] | None = None
    ) -> list[npt.NDArray[np.float32]]:
        """What is made of each prompt, flat or [num_tokens, size]; all in one step."""
        output = self.step(prompts, params)
        assert not output.bad_slots, output.bad_slots
        assert output.pooled is not None
        by_slot = dict(zip(output.pooled.slots.tolist(), output.pooled.values, strict=True))
        return [by_slot[slot] for slot in range(len(prompts))]

    def step(
        self, prompts: Sequence[Sequence[int]], params: PoolingParams | Sequence[PoolingParams] | None = None
    ) -> StepOutput:
        """The same as it comes."""
        each = list(params) if isinstance(params, Sequence) else [params or PoolingParams()] * len(prompts)
        requests = [
            NewRequest(
                slot=slot,
                request_id=str(slot),
                prompt_token_ids=np.array(prompt),
                sampling_params=POOLED.with_changes(seed=0),
                block_ids=NO_BLOCKS,
                pooling=one,
            )
            for slot, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]
        lengths = np.array([len(prompt) for prompt in prompts])
        output = self.execute(
            new_requests=requests, num_seqs=lengths.size, slots=np.arange(lengths.size), num_scheduled_tokens=lengths
        )
        self._to_free = list(range(lengths.size))
        return output
