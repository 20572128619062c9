"""Haystack against Pagoda: OpenAIDocumentEmbedder, OpenAITextEmbedder, a retriever, and CohereRanker.

pip install haystack-ai cohere-haystack
python examples/clients/haystack_embeddings.py --base-url http://127.0.0.1:8000/v1 --model NAME
"""

import argparse

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker

TEXTS = ["The capital of France is Paris.", "Cats sleep a lot.", "Berlin is in Germany."]
QUERY = "What is the capital of France?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    key = Secret.from_token(args.api_key)
    embedder = OpenAIDocumentEmbedder(api_key=key, api_base_url=args.base_url, model=args.model, progress_bar=False)
    documents = embedder.run([Document(content=text) for text in TEXTS])["documents"]
    store = InMemoryDocumentStore()
    store.write_documents(documents)
    query = OpenAITextEmbedder(api_key=key, api_base_url=args.base_url, model=args.model).run(QUERY)["embedding"]
    found = InMemoryEmbeddingRetriever(store, top_k=3).run(query_embedding=query)["documents"]
    assert len(found) == len(TEXTS)
    print(f"found: {found[0].content!r}")

    ranker = CohereRanker(model=args.model, api_key=key, api_base_url=args.base_url.removesuffix("/v1"), top_k=2)
    ranked = ranker.run(query=QUERY, documents=found)["documents"]
    assert len(ranked) == 2
    print(f"best: {ranked[0].content!r}")


if __name__ == "__main__":
    main()
