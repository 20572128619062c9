"""Logits processors: user code that changes logits of sequences whose parameters ask for it.

A processor is found under the entry-point group `pagoda.logits_processors`, or named with --logits-processors
module:Class. Its effect must depend only on a sequence's parameters and token log: after a preemption, or the loss of a
worker, a sequence continues in another slot with only its log replayed.
"""

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pagoda_common.errors import ConfigError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.process.entry_points import entry_points
from pagoda_worker.memory.transfers import to_device
from pagoda_worker.sampling.columns import grown
from pagoda_worker.sampling.logits_state import LogitsBatch
from pagoda_worker.steps.step import IntArray

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "pagoda.logits_processors"


class LogitsProcessor(ABC):
    """The base class of processors. One instance serves all sequences of a worker."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def is_needed(self, params: SamplingParams) -> bool:
        """Whether to process a sequence with these parameters; by default, if it has extra_args.

        Other sequences are never passed to the processor.
        """
        return bool(params.extra_args)

    def validate_params(self, params: SamplingParams) -> None:  # noqa: B027 (nothing to check is a valid answer)
        """Check the arguments (`params.extra_args`, from vllm_xargs over HTTP) of a sequence that needs this processor.

        Raises:
            ValueError: they are invalid; the client gets the message as an invalid request.
        """

    def update_state(self, *, added: Mapping[int, SamplingParams], removed: Sequence[int]) -> None:  # noqa: B027 (as above)
        """Add and remove sequences that need this processor; called between steps, only if there are any.

        Args:
            added: parameters by slot, a small integer that identifies a sequence until it is removed.
            removed: slots; applied before `added`.
        """

    @abstractmethod
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """The changed logits.

        Args:
            logits: [n, vocab_size] float32, a row for each sequence of the batch that needs this processor. May be
            overwritten. batch: slots and token logs of the rows.

        Returns:
            [n, vocab_size]; -inf for tokens that must not be sampled.
        """


class LogitsProcessors:
    """The loaded processors, and which slots need which of them."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors = tuple(processors)
        self._is_needed = np.zeros((len(self._processors), 0), dtype=np.bool_)
        """[processors, slots]."""

    @property
    def is_empty(self) -> bool:
        """Whether no processor is loaded."""
        return not self._processors

    def remove(self, slots: IntArray) -> None:
        """Sequences have left their slots; unknown slots are ignored."""
        slots = slots[slots < self._is_needed.shape[1]]
        for number, processor in enumerate(self._processors):
            removed = slots[self._is_needed[number, slots]].tolist()
            if removed:
                self._is_needed[number, removed] = False
                try:
                    processor.update_state(added={}, removed=removed)
                except Exception:
                    logger.exception("logits processor %s failed", type(processor).__qualname__)

    def add(self, slot: int, params: SamplingParams) -> str | None:
        """A sequence has entered a slot. Returns an error message for invalid parameters, else None."""
        for number, processor in enumerate(self._processors):
            try:
                if not processor.is_needed(params):
                    continue
                processor.validate_params(params)
                self._is_needed = grown(self._is_needed, (len(self._processors), slot + 1))
                self._is_needed[number, slot] = True
                processor.update_state(added={slot: params}, removed=[])
            except ValueError as error:
                return f"vllm_xargs: {error}"
            except Exception as error:
                logger.exception("logits processor %s failed", type(processor).__qualname__)
                return f"vllm_xargs: {error!r}"
        return None

    def has(self, slot: int) -> bool:
        """Whether any processor is needed in the slot."""
        return slot < self._is_needed.shape[1] and bool(self._is_needed[:, slot].any())

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """Logits after all processors; the input is not changed.

        A processor that raises leaves NaN in the rows that need it, which ends only their sequences.
        """
        if not self._processors:
            return logits
        known = batch.slots < self._is_needed.shape[1]
        for number, processor in enumerate(self._processors):
            rows = np.flatnonzero(known)
            rows = rows[self._is_needed[number, batch.slots[rows]]]
            if not rows.size:
                continue
            place = to_device(rows, logits.device)
            part = logits[place]
            try:
                changed = processor.apply(part, batch.rows(rows))
                if changed.shape != part.shape:
                    raise ValueError(f"it gave logits of shape {tuple(changed.shape)} for {tuple(part.shape)}")
            except Exception:
                logger.exception("logits processor %s failed", type(processor).__qualname__)
                changed = torch.full_like(part, torch.nan)
            logits = logits.index_copy(0, place, changed.to(logits.dtype))
        return logits


def load_logits_processors(names: Sequence[str], *, vocab_size: int, device: torch.device) -> LogitsProcessors:
    """The installed processors (by entry point), then those of `names`, each module:Class.

    Raises:
        ConfigError: a processor cannot be loaded, or is not a LogitsProcessor.
    """
    installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)
    found = [*(entry.value for entry in installed), *names]
    loaded = [_made(name, vocab_size=vocab_size, device=device) for name in found]
    if loaded:
        logger.info("logits processors: %s", ", ".join(type(processor).__qualname__ for processor in loaded))
    return LogitsProcessors(loaded)


def _made(name: str, *, vocab_size: int, device: torch.device) -> LogitsProcessor:
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)(vocab_size=vocab_size, device=device)
    except Exception as error:
        raise ConfigError(f"logits processor {name!r} cannot be loaded: {error}", field="logits_processors") from error
    if not isinstance(made, LogitsProcessor):
        message = f"logits processor {name!r} must be a {LogitsProcessor.__module__}.{LogitsProcessor.__qualname__}"
        raise ConfigError(message, field="logits_processors")
    return made
