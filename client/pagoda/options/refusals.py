"""Calls of vLLM's LLM that Pagoda does not support: each raises an error with the reason."""

from collections.abc import Mapping
from typing import Any, NoReturn

from pagoda_common.errors import Code, InvalidRequest, PagodaError

EXTRAS = {
    "lora_request": "LLM.embed takes no adapter; POST /v1/embeddings does, by the model's name",
    "mm_processor_kwargs": "models take text only",
    "trace_headers": "there is no tracing",
    "data_parallel_rank": "the scheduler routes requests by cached prefix",
    "reset_running_requests": "running requests keep their prefixes",
    "reset_connector": "there is no KV connector",
    "stat_loggers": "use the server's /metrics",
    "usage_context": "",
    "start_engine_loop": "",
    "enable_log_requests": "log requests in your program",
    "disable_log_stats": "",
    "enable_multiprocessing": "",
}
"""Arguments of vLLM's calls that nothing stands for, and why they are refused; without a reason they are accepted."""


def _is_missing(call: str, reason: str) -> NoReturn:
    raise PagodaError(f"LLM.{call} is not supported: {reason}", code=Code.UNIMPLEMENTED)


def refuse_extras(extras: Mapping[str, Any]) -> None:
    """Refuse the arguments that vLLM has besides ours when they ask for something.

    Raises:
        InvalidRequest: one does; `field` names it.
        TypeError: vLLM does not have it either.
    """
    for name, value in extras.items():
        if name not in EXTRAS:
            raise TypeError(f"unexpected argument {name!r}")
        if value and EXTRAS[name]:
            raise InvalidRequest(f"{name} is not supported: {EXTRAS[name]}", field=name)


class RefusedCalls:
    """Whatever the arguments: PagodaError with UNIMPLEMENTED."""

    def collective_rpc(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Calls into the workers."""
        _is_missing(
            "collective_rpc",
            "workers are separate processes that accept only gRPC calls; use LLM.reload_weights for new weights",
        )

    def apply_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """A function on the model."""
        _is_missing("apply_model", "the model is in another process, to which no code is sent")

    def start_profile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Tracing of the workers."""
        _is_missing("start_profile", "`pagoda serve --scheduler-metrics-port` shows where a step's time goes")

    def stop_profile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """The end of `start_profile`."""
        _is_missing("stop_profile", "there is no start_profile")

    def reset_mm_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        """The cache of images."""
        _is_missing("reset_mm_cache", "models take text only")

    def init_weight_transfer_engine(self, *args: Any, **kwargs: Any) -> NoReturn:
        """New weights from a trainer."""
        _is_missing("init_weight_transfer_engine", "weights come from checkpoints")

    def update_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        """New weights from a trainer."""
        _is_missing("update_weights", "weights come from checkpoints: LLM.reload_weights(directory)")
