"""Maps options of recurrent layers to modules. Knows which module computes which; has no tensors."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from pagoda_worker.models.delta_net import GatedDeltaNet, delta_net_state
from pagoda_worker.models.mamba import Mamba, mamba_state
from pagoda_worker.models.mamba2 import Mamba2, mamba2_state
from pagoda_worker.models.model import RecurrentLayer
from pagoda_worker.models.recurrent_spec import DeltaNetSpec, Mamba2Spec, MambaSpec, RecurrentSpec, ShortConvSpec
from pagoda_worker.models.short_conv import ShortConv, short_conv_state
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel

RecurrentMixer: TypeAlias = GatedDeltaNet | Mamba | Mamba2 | ShortConv


class _Kind(NamedTuple):
    """The module and the state of one kind; both take its spec as `net`."""

    module: Callable[..., RecurrentMixer]
    state: Callable[[Any], RecurrentLayer]


KINDS: Mapping[type, _Kind] = {
    DeltaNetSpec: _Kind(GatedDeltaNet, delta_net_state),
    MambaSpec: _Kind(Mamba, mamba_state),
    Mamba2Spec: _Kind(Mamba2, mamba2_state),
    ShortConvSpec: _Kind(ShortConv, short_conv_state),
}


def recurrent_layers(spec: DecoderSpec) -> tuple[RecurrentLayer, ...]:
    """The states of each recurrent layer of a model, or of a rank's part."""
    if spec.recurrence is None:
        return ()
    one = KINDS[type(spec.recurrence)].state(spec.recurrence)
    return (one,) * sum(spec.is_recurrent(layer) for layer in range(spec.num_layers))


def recurrent_mixer(
    *, spec: DecoderSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE
) -> RecurrentMixer:
    """The recurrent part of a layer."""
    net: RecurrentSpec | None = spec.recurrence
    assert net is not None, "recurrent layers have a spec"
    return KINDS[type(net)].module(spec=spec, net=net, state=spec.state_index(layer), prefix=prefix, parallel=parallel)
