"""ModelBuilder: builds a model from config.json on the meta device, once for every set of weights that is read."""

from dataclasses import dataclass, replace

import torch

from pagoda_common.errors import ModelLoadError, PagodaError
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.models.model import BuildConfig, Model
from pagoda_worker.models.registry import factory_of
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel

FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that invalid values in config.json cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBuilder:
    """The builder of one rank."""

    config: BuildConfig
    parallel: TensorParallel

    def of(self, checkpoint: HfConfig) -> "ModelBuilder":
        """The builder of another checkpoint, for the same engine and rank."""
        return replace(self, config=replace(self.config, checkpoint=checkpoint))

    def build(self) -> Model:
        """This rank's part, without weights.

        Raises:
            ModelLoadError: no implementation runs this architecture, or config.json cannot be served.
            ConfigError: the ranks cannot share the model.
        """
        return self._build(self.parallel)

    def build_whole(self, part: Model) -> Model:
        """The whole model of all ranks, without weights.

        Args:
            part: result of `build`, which is the whole model for one rank.
        """
        return part if self.parallel.world_size == 1 else self._build(ALONE)

    def _build(self, parallel: TensorParallel) -> Model:
        try:
            with torch.device("meta"):
                return factory_of(self.config)(config=self.config, parallel=parallel)
        except PagodaError:
            raise
        except FAULTS as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ModelLoadError(f"cannot build a model from config.json: {reason}") from error
