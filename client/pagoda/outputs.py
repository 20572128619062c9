"""What generation and embedding give, where vLLM has it."""

from pagoda import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput

__all__ = ["CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "RequestOutput"]
