"""AttentionChoice: chooses a step's attention kernels. Other packages serve steps that no CUDA graph replays."""

import logging
import time as clock
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagoda_common.config.engine_config import EngineConfig
from pagoda_kernels.attention.paged_attention import MAX_TRITON_HEAD_DIM, paged_attention
from pagoda_kernels.attention.plan import AttentionBackend, AttentionPlan
from pagoda_kernels.external.adapter import Adapter, AttentionNeeds, Scoring
from pagoda_kernels.external.adapters import ADAPTERS, installed_adapters
from pagoda_kernels.native.library import default_cache_directory
from pagoda_kernels.selection import triton_kernel
from pagoda_worker.attention.measurement import StepBounds, Timer, difference, measure, time_on_device
from pagoda_worker.attention.table import OURS, AttentionTable, load_table, shape_of
from pagoda_worker.memory.device import cache_dtype
from pagoda_worker.models.model import AttentionLayer
from pagoda_worker.steps.step import IntArray

logger = logging.getLogger(__name__)


class AttentionChoice:
    """The adapters whose results are correct, and the table that says when to use each."""

    def __init__(self, adapters: Mapping[str, Adapter] | None = None, table: AttentionTable | None = None) -> None:
        """Without adapters every step uses Pagoda's kernels. `table`: None gives every step to the only adapter."""
        self._adapters = dict(adapters or {})
        self._table = table
        assert table is not None or len(self._adapters) <= 1, "a choice has something to go by"

    @property
    def names(self) -> list[str]:
        """Packages that may be chosen in addition to Pagoda's kernels."""
        return list(self._adapters)

    def for_step(self, query_lens: IntArray, seq_lens: IntArray) -> AttentionBackend | None:
        """The package for a step with these query tokens and keys of each sequence; None: Pagoda's kernels."""
        if not self._adapters or not query_lens.size:
            return None
        if self._table is None:
            (name,) = self._adapters
        else:
            name = self._table.fastest(shape_of(query_lens, seq_lens), self._adapters)
        return None if name == OURS else partial(self._attend, name)

    def _attend(
        self,
        name: str,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """The adapter's result. If it fails, Pagoda's kernels compute it, and the adapter is not used again."""
        try:
            if name in self._adapters:
                adapter = self._adapters[name]
                return adapter(query, k_cache, v_cache, plan, scale=scale, window=window, softcap=softcap)
        except torch.OutOfMemoryError:
            raise  # ours would have no more
        except Exception as error:
            _say_out(name, f"it failed in a step: {_first_line(error)}")
            self._adapters.pop(name, None)
        plan.backend = None
        return paged_attention(query, k_cache, v_cache, plan, scale=scale, window=window, softcap=softcap)


def choose_attention(
    config: EngineConfig,
    layers: Sequence[AttentionLayer],
    *,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
    has_windows: bool = False,
) -> AttentionChoice:
    """The choice for --attention-backend on this device, for this rank of a model. No adapters on a CPU, or where
    Pagoda's own kernel does not run (also by --reference-kernels)."""
    asked = config.model.attention_backend
    if has_windows and device.type == "cuda":  # of other packages no one knows whether they read what left a window
        if asked not in ("auto", OURS):
            logger.warning("%s may read blocks that left a window: attention is computed by %s", asked, OURS)
        return AttentionChoice()
    if any(layer.chunk is not None and layer.chunk < max_model_len for layer in layers) and device.type == "cuda":
        if asked not in ("auto", OURS):
            logger.warning("%s does not compute attention in chunks, %s does", asked, OURS)
        return AttentionChoice()
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    if any(layer.latent_rank for layer in layers) and device.type == "cuda":
        if asked not in ("auto", OURS):
            logger.warning("%s does not compute attention over latents, %s does", asked, OURS)
        return AttentionChoice()
    if device.type != "cuda" or asked == OURS or len(shapes) != 1:  # what is measured is one shape
        return AttentionChoice()
    num_heads, num_kv_heads, head_dim = next(iter(shapes))
    if head_dim > MAX_TRITON_HEAD_DIM:
        return AttentionChoice()
    if triton_kernel("paged_attention", torch.empty(0, dtype=dtype, device=device)) is None:
        return AttentionChoice()
    needs = AttentionNeeds(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=config.cache.block_size,
        dtype=dtype,
        cache_dtype=cache_dtype(config.cache.kv_cache_dtype, dtype),
        layers=scorings(layers),
        has_biases=any(layer.has_biases for layer in layers),
        capability=torch.cuda.get_device_capability(device),
    )
    candidates = installed_adapters() if asked == "auto" else [ADAPTERS[asked]]
    adapters = found_right(candidates, needs, device)
    if asked != "auto":
        choice = AttentionChoice(adapters)
    else:
        bounds = StepBounds(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        name = torch.cuda.get_device_name(device)
        choice = measured_choice(adapters, needs, bounds, device, device_name=name, directory=_directory())
    torch.cuda.empty_cache()  # of made-up steps, before the KV cache takes what is free
    return choice


def _directory() -> Path | None:
    """Directory of stored tables; None: this user has no home directory."""
    try:
        return default_cache_directory().parent / "attention"
    except RuntimeError:
        return None


def scorings(layers: Sequence[AttentionLayer]) -> tuple[Scoring, ...]:
    """Scoring options of each layer of a model."""
    return tuple(Scoring(layer.scale, layer.window, layer.softcap) for layer in layers)


@torch.inference_mode()
def found_right(candidates: Sequence[type[Adapter]], needs: AttentionNeeds, device: torch.device) -> dict[str, Adapter]:
    """The adapters that serve such layers and agree with Pagoda's kernels. Logs one line for each of the others."""
    adapters: dict[str, Adapter] = {}
    for candidate in candidates:
        try:
            reason = candidate.refusal(needs)
            if reason is None:
                worst = difference(candidate, needs, device)
                if worst <= 1:
                    adapters[candidate.name] = candidate(needs=needs, device=device)
                else:
                    reason = f"its results are {worst:.3g} tolerances from ours"
        except Exception as error:  # whatever it was: our kernels do without it
            reason = _first_line(error)
        if reason is not None:
            _say_out(candidate.name, reason)
    return adapters


def measured_choice(
    adapters: Mapping[str, Adapter],
    needs: AttentionNeeds,
    bounds: StepBounds,
    device: torch.device,
    *,
    device_name: str,
    directory: Path | None,
    time: Timer = time_on_device,
) -> AttentionChoice:
    """Use the table stored in `directory` for these adapters, this device and these layers; else measure and store it.
    None stores nothing."""
    if not adapters:
        return AttentionChoice()
    key = table_key(adapters, needs, bounds, device_name)
    table = None if directory is None else load_table(directory, key)
    source = "measured before"
    if table is None:
        started = clock.monotonic()
        try:
            table = measure(adapters, needs, bounds, device, time=time)
        except Exception as error:  # nothing is known about any of them then
            _say_out(" and ".join(adapters), f"measuring failed: {_first_line(error)}")
            return AttentionChoice()
        source = f"measured in {clock.monotonic() - started:.1f} s"
        try:
            if directory is not None:
                table.save(directory, key)
        except OSError as error:
            logger.warning("the table of attention is not kept, the next start measures again: %s", error)
    wins = Counter(table.fastest(shape, adapters) for shape in table.rows)
    told = ", ".join(f"{name} for {count}" for name, count in wins.most_common())
    logger.info("attention, of %d shapes of steps: %s (%s)", len(table.rows), told, source)
    return AttentionChoice({name: adapter for name, adapter in adapters.items() if wins[name]}, table)


def table_key(
    adapters: Mapping[str, Adapter], needs: AttentionNeeds, bounds: StepBounds, device_name: str
) -> dict[str, Any]:
    """The key of a table, as JSON: everything that its measurements depend on."""
    return {
        "device": device_name,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "packages": {name: adapter.version() for name, adapter in adapters.items()},
        "heads": [needs.num_heads, needs.num_kv_heads, needs.head_dim],
        "block_size": needs.block_size,
        "dtype": [str(needs.dtype), str(needs.cache_dtype)],
        "layers": [list(layer) for layer in needs.layers],
        "bounds": [bounds.max_num_seqs, bounds.max_num_batched_tokens, bounds.max_model_len],
    }


def _say_out(names: str, reason: str) -> None:
    logger.warning("%s does not compute attention, our kernels do: %s", names, reason)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
