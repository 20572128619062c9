"""ForwardPass: runs the model over the rows of one step, in the fastest way. Knows no slots and no sampling."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.decoder.composed_layers import ComposedLayers
from pagoda_kernels.decoder.decoder_layers import DecoderLayers, LayerAdapters
from pagoda_worker.attention.choice import AttentionChoice
from pagoda_worker.graphs.decode_graphs import DecodeGraphs
from pagoda_worker.lora.lora_rows import LoraRows, Matrices
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.memory.state_pool import StatePool
from pagoda_worker.memory.transfers import to_device
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.model import Model
from pagoda_worker.steps.input_batch import ForwardInputs
from pagoda_worker.steps.step import IntArray
from pagoda_worker.steps.step_clock import StepClock

LAYERS = "layers."
"""Prefix of the names of modules in layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """The result of a forward pass, on the device."""

    logits: Tensor
    """[num_rows, vocab_size] float32. The next forward pass may overwrite them."""
    likeliest: tuple[Tensor, Tensor] | None = None
    """`argmax` of the logits, if known."""
    hidden: Tensor | None = None
    """[num_tokens, hidden_size], if kept."""


class ForwardPass:
    """Runs a replayed graph, all layers in one call, or operation by operation."""

    def __init__(
        self,
        *,
        model: Model,
        kv_cache: KVCache,
        dtype: torch.dtype,
        device: torch.device,
        states: StatePool | None = None,
        decode_graphs: DecodeGraphs | None = None,
        attention: AttentionChoice | None = None,
        lora: LoraRows | None = None,
    ) -> None:
        """
        Args:
            states: of recurrent layers.
            decode_graphs: recorded ones, over the same model and cache.
            attention: chooses attention kernels in steps without a graph; None: Pagoda's kernels.
            lora: adapter rows for the model's layers; None: sequences never have adapters.
        """
        self.decode_graphs = decode_graphs
        """None: every step is launched kernel by kernel."""
        self.fused = model.fuse_layers(
            k_caches=kv_cache.k_caches, v_caches=kv_cache.v_caches, places=kv_cache.layout.places
        )
        """None: layers run one after the other."""
        self._model = model
        self._kv_cache = kv_cache
        self._states = states
        self._dtype = dtype
        self._device = device
        self._attention = attention or AttentionChoice()
        self._lora = lora
        self._matrices: Matrices | None = None
        """Adapters that the next three attributes belong to."""
        self._places: Tensor | None = None
        """See LayerAdapters; None: `fused` does not support all layers that they change."""
        self._changes_ends = False
        """Whether they change parts before or after the layers."""

    def run(
        self,
        inputs: ForwardInputs,
        logit_rows: IntArray,
        clock: StepClock,
        *,
        needs_hidden: bool = False,
        token_ids: Tensor | None = None,
    ) -> Computed:
        """Write the step's keys and values, and return the logits of some of its tokens.

        Args:
            logit_rows: indexes of the step's tokens.
            needs_hidden: hidden states are needed too. Steps with graphs only give logits.
            token_ids: [num_tokens] int64 on the device, instead of those in the inputs.
        """
        if self._lora is not None:
            self._lora.begin(inputs.adapters, inputs.num_scheduled_tokens)
        graphs = None if inputs.adapters else self.decode_graphs
        fused, adapters = self.fused, None
        if inputs.adapters:
            adapters = self._layer_adapters()
            fused = None if adapters is None else fused
        size = 0 if graphs is None else graphs.size_for(inputs, logit_rows.size)
        if graphs is not None and size:
            graphs.load(inputs, size, token_ids)
            clock.prepared()
            logits = graphs.replay(size, inputs.slots.size)
            clock.computed()
            return Computed(logits=logits)
        if token_ids is None:
            token_ids = to_device(inputs.input_ids, self._device)
        positions = to_device(inputs.positions, self._device)
        context = self._whole(inputs) if self._model.only_pools else self._context(inputs, positions, fused, adapters)
        clock.prepared()
        if fused is not None and fused.has_ends and not needs_hidden and not (adapters and self._changes_ends):
            batch = token_ids, context.plans, context.slot_mappings, positions, to_device(logit_rows, self._device)
            more = (adapters,) if adapters else ()
            logits, likeliest = fused.logits(*batch, *more)
            clock.computed()
            return Computed(logits=logits, likeliest=likeliest)
        hidden = self._model(token_ids, positions, context)
        logits = self.logits_of(hidden, logit_rows)
        clock.computed()
        return Computed(logits=logits, hidden=hidden)

    def _layer_adapters(self) -> LayerAdapters | None:
        """The step's adapters for the call of all layers; None: there is no such call, or it does not support them."""
        if self._lora is None or self._lora.grouped is None or not isinstance(self.fused, DecoderLayers):
            return None
        matrices = self._lora.matrices
        if matrices is not self._matrices:
            names = self.fused.matrix_names
            rest = matrices.layers.difference(*names)
            self._changes_ends, self._matrices = bool(rest), matrices
            self._places = None
            if not any(layer.startswith(LAYERS) for layer in rest):
                self._places = torch.tensor([matrices.places_of(of_layer) for of_layer in names])
        return None if self._places is None else LayerAdapters(self._lora.grouped, matrices.fields, self._places)

    def logits_of(self, hidden: Tensor, rows: IntArray) -> Tensor:
        """[num_rows, vocab_size] float32 logits of some rows of [num_tokens, hidden_size]."""
        if rows.size != hidden.shape[0]:
            hidden = hidden.index_select(0, to_device(rows, self._device))
        if self._lora is None:
            return self._model.compute_logits(hidden)
        with self._lora.selected(rows):
            return self._model.compute_logits(hidden)

    def _whole(self, inputs: ForwardInputs) -> ForwardContext:
        """Run a model that sees whole sequences and keeps no state."""
        lengths = inputs.num_scheduled_tokens
        token_types: Tensor | None = None
        if inputs.second_texts.size:
            seconds = np.repeat(np.where(inputs.second_texts > 0, inputs.second_texts, 1 << 40), lengths)
            token_types = to_device((inputs.positions >= seconds).astype(np.int64), self._device)
        return ForwardContext(
            plans=(),
            slot_mappings=(),
            k_caches=(),
            v_caches=(),
            places={},
            rotary={},
            starts=[0, *np.cumsum(lengths).tolist()],
            token_types=token_types,
        )

    def _context(
        self,
        inputs: ForwardInputs,
        positions: Tensor,
        fused: DecoderLayers | ComposedLayers | None,
        adapters: LayerAdapters | None,
    ) -> ForwardContext:
        backend = self._attention.for_step(inputs.num_scheduled_tokens, inputs.seq_lens)
        plans = [
            AttentionPlan(
                query_lens=inputs.num_scheduled_tokens,
                seq_lens=inputs.seq_lens,
                block_table=block_table,
                block_size=self._kv_cache.block_size,
                dtype=self._dtype,
                device=self._device,
                backend=backend,
            )
            for block_table in inputs.block_tables
        ]
        return ForwardContext(
            plans=plans,
            slot_mappings=[to_device(slot_mapping, self._device) for slot_mapping in inputs.slot_mappings],
            k_caches=self._kv_cache.k_caches,
            v_caches=self._kv_cache.v_caches,
            places=self._kv_cache.layout.places,
            states=() if self._states is None else self._states.tensors,
            recurrent=None
            if self._states is None
            else self._states.batch(inputs.slots, inputs.num_scheduled_tokens, inputs.num_draft_tokens),
            rotary={} if fused is not None else self._model.rotary(positions),
            fused=fused,
            adapters=adapters,
        )
