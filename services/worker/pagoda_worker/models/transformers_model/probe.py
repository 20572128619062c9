"""Runs a transformers module over two tokens without values, and records how it attends and what it returns."""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.model import AttentionLayer
from pagoda_worker.models.transformers_model.attention import CURRENT, MaskRule, PassingCache, Probe
from pagoda_worker.models.transformers_model.fault import part_at_fault
from pagoda_worker.models.transformers_model.positions import give_positions

NUM_TOKENS = 2
META = torch.device("meta")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Observations of a trial pass."""

    layers: tuple[AttentionLayer, ...]
    inner: nn.Module
    """The module that returns the final hidden states."""
    inner_output: type[ModelOutput]
    embedding_size: int
    vocab_size: int
    has_masks: bool
    """Whether its layers get rules instead of masks; else they get no masks, and all are causal."""


def model_inputs(
    input_ids: Tensor, positions: Tensor, cache: PassingCache, arguments: Collection[str]
) -> dict[str, Any]:
    """The arguments of transformers' module for a packed batch.

    Args:
        input_ids, positions: [num_tokens].
        arguments: names of its forward's parameters.
    """
    named = {"input_ids": input_ids[None], "position_ids": positions[None], "use_cache": False}
    named |= {"cache": cache, "past_key_values": cache, "return_dict": True}
    if "cache" in arguments:
        del named["past_key_values"]
    return {name: value for name, value in named.items() if name in arguments}


def probe(backbone: PreTrainedModel) -> Seen:
    """
    Raises:
        ModelLoadError: it does more than causal attention with given positions; the message says what.
    """
    if "position_ids" not in inspect.signature(backbone.forward).parameters and not give_positions(backbone):
        raise ModelLoadError("its forward pass takes no positions")
    try:
        return _probe(backbone, has_masks=True)
    except _LooksAtMasksError:  # most of these only check their shape, and take none
        return _probe(backbone, has_masks=False)


class _LooksAtMasksError(Exception):
    """Raised when a module uses a mask itself."""


@torch.inference_mode()
def _probe(backbone: PreTrainedModel, *, has_masks: bool) -> Seen:
    arguments = frozenset(inspect.signature(backbone.forward).parameters)
    tokens = torch.arange(NUM_TOKENS, device=META)
    running, given = Probe(tokens, has_masks=has_masks), _Given()
    handles = [module.register_forward_hook(given) for module in backbone.modules() if module is not backbone]
    CURRENT.running = running
    try:
        with _buffers_on_meta(backbone), _NoValues(), _NoIndices():  # type: ignore[no-untyped-call]  # torch
            output = backbone(**model_inputs(tokens, tokens, PassingCache(), arguments))
    except ModelLoadError:
        raise
    except Exception as error:  # whatever modules raise
        if MaskRule.__name__ in str(error):
            raise _LooksAtMasksError from error
        if not has_masks:
            raise ModelLoadError("it uses custom attention masks") from error
        if PassingCache.__name__ in str(error):
            raise ModelLoadError("its layers cache more than keys and values") from error
        raise ModelLoadError(_untraced(error)) from error
    finally:
        CURRENT.running = None
        for handle in handles:
            handle.remove()
    if not running.layers:
        raise ModelLoadError("its attention does not go through transformers' AttentionInterface")
    if given.module is None:
        raise ModelLoadError("its module returns no final hidden states")
    _check_layers(backbone, running)
    return Seen(
        layers=tuple(running.layers),
        inner=given.module,
        inner_output=given.output,
        embedding_size=given.size,
        vocab_size=int(output.logits.shape[-1]),
        has_masks=has_masks,
    )


def _untraced(error: Exception) -> str:
    """The reason why a pass without values failed, by the place."""
    name = part_at_fault(error) or "module"
    if isinstance(error, (AssertionError, TypeError, ValueError)):  # of what it was called with
        return f"its {name} needs inputs other than token ids and positions"
    return f"its {name} cannot run on the meta device, so its attention cannot be checked"


def _check_layers(backbone: PreTrainedModel, running: Probe) -> None:
    """
    Raises:
        ModelLoadError: some layers did not attend through the interface.
    """
    recurrent = [name for name, module in backbone.named_modules() if isinstance(module, nn.Conv1d)]
    text = backbone.config.get_text_config(decoder=True)
    num_layers = int(getattr(text, "num_hidden_layers", 0) or 0)
    if len(running.layers) < num_layers:
        raise ModelLoadError(f"only {len(running.layers)} of its {num_layers} layers attend through the interface")
    if recurrent and not hasattr(backbone.config, "vision_config") and not hasattr(backbone.config, "audio_config"):
        raise ModelLoadError(f"it has convolutions over tokens ({recurrent[0]})")


class _Given:
    """A hook that records the outermost module with final hidden states."""

    module: nn.Module | None = None
    output: type[ModelOutput] = ModelOutput
    size = 0

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(output, ModelOutput) and isinstance(hidden, Tensor):  # outer modules end after inner ones
            self.module, self.output, self.size = module, type(output), int(hidden.shape[-1])


_VALUES: dict[Any, Callable[[Tensor], Any]] = {
    torch.Tensor.item: lambda x: False if x.dtype == torch.bool else 0,
    torch.Tensor.tolist: lambda x: torch.zeros(x.shape, dtype=torch.int64, device="cpu").tolist(),
    torch.Tensor.__bool__: lambda x: False,
    torch.Tensor.__int__: lambda x: 0,
    torch.Tensor.__float__: lambda x: 0.0,
    torch.Tensor.__index__: lambda x: 0,
    torch.Tensor.__contains__: lambda x: False,
}


class _NoValues(TorchFunctionMode):
    """Returns zero and false where code needs values that do not exist."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of an operation."""
        if func in _VALUES and args[0].is_meta:
            return _VALUES[func](args[0])
        return func(*args, **(kwargs or {}))


class _NoIndices(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Returns empty results where code needs indices of values that do not exist."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of an operation."""
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return torch.empty(0, args[0].dim(), dtype=torch.int64, device=META)
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default) and args[0].is_meta:
            return _VALUES[torch.Tensor.item](args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _buffers_on_meta(model: nn.Module) -> Iterator[None]:
    kept = [
        (module, leaf, buffer)
        for module in model.modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    for module, leaf, buffer in kept:
        module._buffers[leaf] = buffer.to(META)
    try:
        yield
    finally:
        for module, leaf, buffer in kept:
            module._buffers[leaf] = buffer
