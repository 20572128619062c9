"""Logits processors: code of others that changes logits, for those sequences whose parameters ask for it.

A processor is found under the entry-point group `pagoda.logits_processors`, or named with --logits-processors
module:Class. What it does must follow from a sequence's parameters and its token log alone: after a preemption, or the
loss of a worker, a sequence continues in another slot with its log replayed, and nothing else.
"""

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

import numpy as np
import torch
from torch import Tensor

from pagoda_common.errors import ConfigError
from pagoda_common.params.sampling_params import SamplingParams
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

        Sequences that do not need a processor never meet it.
        """
        return bool(params.extra_args)

    def validate_params(self, params: SamplingParams) -> None:  # noqa: B027 (nothing to check is a valid answer)
        """Check the arguments (`params.extra_args`, from vllm_xargs over HTTP) of a sequence that needs this.

        Raises:
            ValueError: they are wrong; the client gets the message, as an invalid request.
        """

    def update_state(self, *, added: Mapping[int, SamplingParams], removed: Sequence[int]) -> None:  # noqa: B027 (as above)
        """Sequences that need this come and go; called between steps, and only when there are some.

        Args:
            added: parameters by slot, the small integer that names a sequence until it is removed.
            removed: slots; applied before `added`.
        """

    @abstractmethod
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """The logits that count instead.

        Args:
            logits: [n, vocab_size] float32, one row for each sequence of the batch that needs this. May be overwritten.
            batch: slots and token logs of the rows.

        Returns:
            [n, vocab_size]; -inf where a token may not be sampled.
        """


class LogitsProcessors:
    """The loaded processors, and which slots need which of them."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors = tuple(processors)
        self._is_needed = np.zeros((len(self._processors), 0), dtype=np.bool_)
        """[processors, slots]."""

    @property
    def is_empty(self) -> bool:
        """No processor is loaded."""
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
        """A sequence has entered a slot. Returns what is wrong with its parameters; None when nothing is."""
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
        """Whether some processor is needed in a slot."""
        return slot < self._is_needed.shape[1] and bool(self._is_needed[:, slot].any())

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """Logits after all processors; those given are not changed.

        A processor that raises leaves NaN in the rows that asked for it, which ends their sequences and no others.
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
        ConfigError: one cannot be loaded, or is no LogitsProcessor.
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
