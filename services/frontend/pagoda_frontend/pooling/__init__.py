"""HTTP: vectors, labels, scores and ranks of texts, in vLLM's, Jina's and Cohere's shapes."""
