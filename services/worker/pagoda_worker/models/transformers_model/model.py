"""TransformersModel: a causal language model of transformers as a Model. Knows no checkpoint files and no steps."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.model import BuildConfig
from pagoda_worker.models.transformers_model.attention import CURRENT, PassingCache, Run
from pagoda_worker.models.transformers_model.backbone import build_backbone
from pagoda_worker.models.transformers_model.hosted_experts import host_experts
from pagoda_worker.models.transformers_model.hosted_layers import host_layers
from pagoda_worker.models.transformers_model.hosted_model import HostedModel
from pagoda_worker.models.transformers_model.positions import position_offset
from pagoda_worker.models.transformers_model.probe import model_inputs, probe
from pagoda_worker.models.transformers_model.sharding import PlanSharding
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
"""Config keys of the maximum sequence length."""
UNBOUND_LENGTH = 32768
"""Tokens of context of a model whose config does not say."""


class TransformersModel(HostedModel):
    """A transformers module with paged attention and Pagoda's matrices.

    Its attention is found by observation: a pass over two tokens without values records what every layer requests.
    """

    def __init__(self, *, config: BuildConfig, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        """See ModelFactory."""
        super().__init__()
        self.architecture = str((config.checkpoint.get("architectures") or [config.checkpoint.get("model_type")])[0])
        try:
            self.backbone = build_backbone(config.checkpoint)
            host_layers(self.backbone, prefix=prefix, parallel=parallel)
            host_experts(self.backbone, prefix=prefix)
            self.take_buffers()
            seen = probe(self.backbone)
        except ModelLoadError as error:
            raise ModelLoadError(f"transformers cannot run {self.architecture} here: {error}") from error
        self.sharding = PlanSharding(self, parallel)
        self._inner = (seen.inner,)  # in a tuple: it is a part of the backbone
        self._inner_output = seen.inner_output
        self._compute = seen.inner.forward
        self._arguments = frozenset(inspect.signature(self._compute).parameters)
        seen.inner.forward = self._inner_forward
        self._cache = PassingCache()
        self.attention_layers = seen.layers
        self.num_layers = len(seen.layers)
        self.vocab_size, self.embedding_size = seen.vocab_size, seen.embedding_size
        self._has_masks = seen.has_masks
        self._position_offset = position_offset(self.backbone)
        longest = longest_sequence(self.backbone.config.get_text_config(decoder=True))
        self.max_position_embeddings = longest - self._position_offset

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """See Model."""
        positions = positions + self._position_offset if self._position_offset else positions
        running = Run(context, self.attention_layers, positions, has_masks=self._has_masks)
        output = self._run(running, self._inner[0], input_ids, positions)
        return output.last_hidden_state[0]  # type: ignore[no-any-return]  # transformers: Any

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See Model: the outer module's logits for given hidden states."""
        ids = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        running = Run(None, (), ids, given=hidden)  # type: ignore[arg-type]  # no layer runs
        output = self._run(running, self.backbone, ids, ids)
        return output.logits[0].float()  # type: ignore[no-any-return]  # transformers: Any

    def _run(self, running: Run, module: nn.Module, input_ids: Tensor, positions: Tensor) -> Any:
        CURRENT.running = running
        try:
            return module(**self._inputs(input_ids, positions))
        finally:
            CURRENT.running = None

    def _inputs(self, input_ids: Tensor, positions: Tensor) -> dict[str, Any]:
        return model_inputs(input_ids, positions, self._cache, self._arguments)

    def _inner_forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        running = CURRENT.running
        if running is not None and running.given is not None:
            return self._inner_output(last_hidden_state=running.given[None])
        return self._compute(*args, **kwargs)


def longest_sequence(config: Any) -> int:
    """Tokens of context of a transformers config. Rotations that depend on the longest sequence of a batch would make a
    sequence depend on others, so only lengths up to the first change are served."""
    lengths = (getattr(config, name, None) for name in LENGTHS)
    longest = int(next((length for length in lengths if length), UNBOUND_LENGTH))
    rope = getattr(config, "rope_parameters", None) or {}
    for rotation in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        original = rotation.get("original_max_position_embeddings")
        if rotation.get("rope_type") == "longrope" and original:
            longest = min(longest, int(original))
        if rotation.get("rope_type") == "yarn" and original:
            longest = max(longest, int(original * float(rotation.get("factor") or 1)))
    return longest
