"""Pagoda: what users import. Attributes load on first use, so that `import pagoda` is cheap."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagoda_common.version import VERSION

if TYPE_CHECKING:  # what __getattr__ gives, for type checkers
    from pagoda.llm.async_llm import AsyncLLM
    from pagoda.llm.beam_search import BeamSearchParams
    from pagoda.llm.embedding import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from pagoda.llm.llm import LLM
    from pagoda.llm.llm_engine import LLMEngine
    from pagoda.llm.prompts import PromptType, TextPrompt, TokensPrompt
    from pagoda.options.engine_args import AsyncEngineArgs, EngineArgs
    from pagoda_common.params.outputs import CompletionOutput, RequestOutput
    from pagoda_common.params.pooling_params import PoolingParams
    from pagoda_common.params.sampling_params import RequestOutputKind, SamplingParams
    from pagoda_common.params.structured_outputs import StructuredOutputsParams

    AsyncLLMEngine = AsyncLLM

__version__ = VERSION
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    "LLM": "pagoda.llm.llm",
    "LLMEngine": "pagoda.llm.llm_engine",
    "AsyncLLM": "pagoda.llm.async_llm",
    "AsyncLLMEngine": "pagoda.llm.async_llm",
    "AsyncEngineArgs": "pagoda.options.engine_args",
    "EngineArgs": "pagoda.options.engine_args",
    "BeamSearchParams": "pagoda.llm.beam_search",
    "EmbeddingOutput": "pagoda.llm.embedding",
    "EmbeddingRequestOutput": "pagoda.llm.embedding",
    "ClassificationOutput": "pagoda.llm.embedding",
    "ClassificationRequestOutput": "pagoda.llm.embedding",
    "PoolingOutput": "pagoda.llm.embedding",
    "PoolingRequestOutput": "pagoda.llm.embedding",
    "ScoringOutput": "pagoda.llm.embedding",
    "ScoringRequestOutput": "pagoda.llm.embedding",
    "PoolingParams": "pagoda_common.params.pooling_params",
    "PromptType": "pagoda.llm.prompts",
    "TextPrompt": "pagoda.llm.prompts",
    "TokensPrompt": "pagoda.llm.prompts",
    "RequestOutput": "pagoda_common.params.outputs",
    "CompletionOutput": "pagoda_common.params.outputs",
    "RequestOutputKind": "pagoda_common.params.sampling_params",
    "SamplingParams": "pagoda_common.params.sampling_params",
    "StructuredOutputsParams": "pagoda_common.params.structured_outputs",
}
_ENGINES = ("LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    if name in _ENGINES:  # before gRPC is imported, which reads it then; one that is set already stays
        from pagoda_common.process.children import GRPC_ENVIRONMENT

        for key, value in GRPC_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
    return getattr(import_module(_HOMES[name]), name)
