"""StepThreads: sets the number of torch's threads of each step by its number of tokens."""

import logging

import torch

from pagoda_kernels.decoder.decoder_layers import set_num_helpers
from pagoda_worker.steps.step import StepInput
from pagoda_worker.threads import ThreadCounts, num_usable_cores, thread_counts

logger = logging.getLogger(__name__)


class StepThreads:
    """Threads of one worker on a CPU: torch's threads of the calling thread."""

    def __init__(self, asked: int | None = None, *, shares_machine: bool = False) -> None:
        """
        Args:
            asked: number for every step; None: decided by the sizes of the model and of each step.
            shares_machine: the other services run on this machine too.
        """
        self._asked = asked
        self._shares_machine = shares_machine
        self._counts = ThreadCounts(1, 1)
        self._num_helpers = 0

    def choose(self, num_parameters: int, dtype: torch.dtype, *, only_pools: bool = False) -> None:
        """Set the threads for a model of this size, which may be an encoder."""
        if self._asked is not None:
            self._counts = ThreadCounts(self._asked, self._asked)
        else:  # in float32, PyTorch's operations round otherwise on another number of threads
            leaves_core = self._shares_machine and dtype == torch.bfloat16
            self._counts = thread_counts(num_parameters, leaves_core=leaves_core, only_pools=only_pools)
        torch.set_num_threads(self._counts.most)
        logger.debug("%d of %d cores compute", self._counts.most, num_usable_cores())

    def use_for(self, step: StepInput) -> None:
        """Set the threads for the next step."""
        scheduled = step.num_scheduled_tokens
        num_tokens = step.num_seqs if scheduled is None else int(scheduled.sum())
        num_threads = self._counts.of(num_tokens)
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        num_helpers = self._counts.helpers_of(num_tokens)
        if num_helpers != self._num_helpers:
            set_num_helpers(num_helpers)
            self._num_helpers = num_helpers
