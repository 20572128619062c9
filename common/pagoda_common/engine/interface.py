"""The interface of the engine for cores. EngineClient implements it over gRPC; cores that use the interface know no
gRPC."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pagoda_common.engine.stream import AdoptedRequest, EngineRequest, EngineStream
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.pooling_params import PoolingTask


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """An engine's description of its model."""

    model: str
    """Directory or hub id it was loaded from."""
    vocab_size: int
    """Tokens that may be sampled."""
    max_model_len: int
    """Longest prompt plus output, tokens."""
    embedding_size: int
    """Values of an embedding; 0: the worker makes none."""
    eos_token_ids: tuple[int, ...]
    generation_config_json: str
    """generation_config.json of the checkpoint; empty when it has none."""
    pooling_tasks: tuple[PoolingTask, ...] = ()
    """Pooling tasks, the default first; empty: an embedding, if embedding_size is not 0."""
    unserved_pooling_tasks: tuple[PoolingTask, ...] = ()
    """Those that the pooler config leaves out."""
    only_pools: bool = False
    """It generates nothing."""
    labels: tuple[str, ...] = ()
    """Labels of the model."""
    has_matryoshka: bool = False
    """Embeddings may be shortened to their first values."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The lengths that they may be shortened to; empty: any."""
    digest: str = ""
    """64 hexadecimal digits that change with whatever the engine says of its model."""


class Engine(Protocol):
    """Takes requests in token ids and gives tokens. Belongs to one event loop."""

    @property
    def is_connected(self) -> bool:
        """The scheduler is there."""
        ...

    @property
    def num_losses(self) -> int:
        """Counter: times it was lost."""
        ...

    @property
    def is_ready(self) -> bool:
        """Requests are served."""
        ...

    @property
    def lost_for_s(self) -> float | None:
        """Seconds since a scheduler was lost that served; None while one serves, and before one has."""
        ...

    @property
    def is_sleeping(self) -> bool:
        """Requests wait until the engine is woken."""
        ...

    @property
    def not_ready_reason(self) -> str:
        """Why is_ready is false; empty when it is true."""
        ...

    @property
    def model_summary(self) -> ModelSummary | None:
        """The model, once it was known."""
        ...

    @property
    def loras(self) -> Mapping[str, LoraAdapter]:
        """The adapters that requests may have, by name."""
        ...

    async def resolve_lora(self, name: str) -> LoraAdapter | None:
        """The adapter of a name that is not listed, where the engine finds one; raises PagodaError when that fails."""
        ...

    async def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Return when requests are served; raises NotReady after `timeout_s`."""
        ...

    def submit(self, request: EngineRequest) -> EngineStream:
        """Start a request; raises PagodaError when it cannot be taken."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request now. Unknown ids are ignored."""
        ...

    async def adopt(self, resume_key: str) -> list[AdoptedRequest]:
        """The requests that were submitted with this key, as the engine knows them; raises NotFound or NotReady."""
        ...

    def release(self, request_id: str) -> None:
        """The client has everything: the engine need not keep the request for an adopter."""
        ...

    async def metrics_text(self) -> bytes:
        """The engine's own metrics in Prometheus' text format; nothing while it does not answer."""
        ...
