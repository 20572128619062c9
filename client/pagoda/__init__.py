"""Pagoda: what users import. Attributes load on first use, so that `import pagoda` is cheap."""

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    "LLM": "pagoda.llm.llm",
    "AsyncLLM": "pagoda.llm.async_llm",
    "AsyncEngineArgs": "pagoda.llm.engine_args",
    "EngineArgs": "pagoda.llm.engine_args",
    "BeamSearchParams": "pagoda.llm.beam_search",
    "EmbeddingRequestOutput": "pagoda.llm.embedding",
    "PoolingParams": "pagoda_common.params.pooling_params",
    "TextPrompt": "pagoda.llm.prompts",
    "TokensPrompt": "pagoda.llm.prompts",
    "RequestOutput": "pagoda_common.params.outputs",
    "CompletionOutput": "pagoda_common.params.outputs",
    "RequestOutputKind": "pagoda_common.params.sampling_params",
    "SamplingParams": "pagoda_common.params.sampling_params",
    "StructuredOutputsParams": "pagoda_common.params.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    if name in ("LLM", "AsyncLLM"):  # before gRPC is imported, which reads it then; one that is set already stays
        from pagoda_common.process.children import GRPC_ENVIRONMENT

        for key, value in GRPC_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
    return getattr(import_module(_HOMES[name]), name)
