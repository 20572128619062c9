"""The adapters that there are, by the names of --attention-backend."""

from pagoda_kernels.external.adapter import Adapter
from pagoda_kernels.external.flash_attn import FlashAttention
from pagoda_kernels.external.flashinfer import FlashInferAttention

ADAPTERS: dict[str, type[Adapter]] = {adapter.name: adapter for adapter in (FlashInferAttention, FlashAttention)}


def installed_adapters() -> list[type[Adapter]]:
    """Those whose packages are there."""
    return [adapter for adapter in ADAPTERS.values() if adapter.is_installed()]
