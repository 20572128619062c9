"""Embeddings out of a step's hidden states. Knows tensors and rows of a step; no requests."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_common.params.pooling_params import PoolingParams
from pagoda_worker.memory.transfers import to_device
from pagoda_worker.steps.input_batch import ForwardInputs
from pagoda_worker.steps.step import FloatArray, IntArray, PooledColumns


def pool(hidden: Tensor, inputs: ForwardInputs, poolers: Mapping[int, PoolingParams]) -> tuple[PooledColumns, IntArray]:
    """The embeddings of the rows in `inputs.pooled`: of each, the hidden state of its last token.

    Args:
        hidden: [num_tokens, hidden_size], what logits would be computed of.
        poolers: by slot, how.

    Returns:
        Those that are finite, and the slots of the others.

    Source: LAST pooling with normalisation, as decoder-only embedding models want it (vLLM's default for them).
    """
    slots = inputs.slots[inputs.pooled]
    last = np.cumsum(inputs.num_scheduled_tokens)[inputs.pooled] - 1
    states = hidden.index_select(0, to_device(last, hidden.device)).float()
    values: FloatArray = states.cpu().numpy()
    is_finite = np.isfinite(values).all(axis=1)
    is_normalized = np.array([poolers[slot].normalize for slot in slots.tolist()])
    if is_normalized.any():
        unit = F.normalize(torch.from_numpy(values), dim=1).numpy()
        values = np.where(is_normalized[:, None], unit, values)
    return PooledColumns(slots=slots[is_finite], values=values[is_finite]), slots[~is_finite]
